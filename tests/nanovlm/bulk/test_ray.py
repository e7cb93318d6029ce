"""README's example of captions on many machines, on a Ray of this one."""

import json
import random
import re
from pathlib import Path

import pytest

from nanovlm import Captioner
from nanovlm.synthetic import draw, random_scene
from support import ROOT

ray = pytest.importorskip("ray", reason="pip install 'nanovlm[ray]'")


def test_ray_captions_a_folder_as_one_captioner_does(tmp_path, monkeypatch):
    (block,) = re.findall(r"```py\n(import ray.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(block.splitlines()) <= 20
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the workers
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    Path("my_folder").mkdir()
    pictures = [draw(random_scene(random.Random(i)), 96, 96) for i in range(5)]
    for i, picture in enumerate(pictures):
        picture.save(f"my_folder/{i}.png")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    try:
        exec(block, {})
    finally:
        ray.shutdown()
    rows = [json.loads(line) for file in Path("captions").iterdir() for line in file.read_text().splitlines()]
    said = {Path(row["path"]).name: row["caption"] for row in rows}
    assert said == {f"{i}.png": text for i, text in enumerate(Captioner.from_pretrained().captions(pictures))}
    assert all(row.keys() == {"path", "caption"} for row in rows)
