"""The documented example of captioning on many machines with Ray Data, run on a Ray cluster of this machine."""

import json
import random
import re
from pathlib import Path

import pytest

from nanovlm import Captioner
from nanovlm.synthetic import draw, random_scene
from support import ROOT

ray = pytest.importorskip("ray", reason="pip install 'nanovlm[ray]'")


def documented_example():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    (example,) = (block for text in texts for block in re.findall(r"```py\w*\n(import ray.*?)```", text, re.DOTALL))
    return example


def test_ray_captions_a_folder_as_one_captioner_does(tmp_path, monkeypatch):
    example = documented_example()
    assert len(example.splitlines()) <= 20
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the workers
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    Path("my_folder").mkdir()
    images = [draw(random_scene(random.Random(i)), 96, 96) for i in range(5)]
    for i, image in enumerate(images):
        image.save(f"my_folder/{i}.png")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    try:
        exec(example, {})
    finally:
        ray.shutdown()
    rows = [json.loads(line) for file in Path("captions").iterdir() for line in file.read_text().splitlines()]
    captions = {Path(row["path"]).name: row["caption"] for row in rows}
    assert captions == {f"{i}.png": text for i, text in enumerate(Captioner.from_pretrained().captions(images))}
    assert all(row.keys() == {"path", "caption"} for row in rows)
