"""Coverage-guided fuzzing, and what it has found. processing/ has damaged images and tokenizers."""

import json
import shutil
import subprocess
import sys

import pytest

from nanovlm import Captioner
from nanovlm.data import open_source
from nanovlm.errors import CheckpointError, DataError
from nanovlm.options import ReadOptions
from support import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config", "tokenizer", "header", "image", "json", "jsonl", "csv", "requests"])
def test_two_minutes_of_fuzzing_find_nothing(name):
    pytest.importorskip("atheris")
    command = [sys.executable, "-m", "tests.fuzz", name, "--minutes", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    assert run.returncode == 0 and "Done " in run.stderr, run.stdout + run.stderr[-3000:]


def test_half_a_character_and_a_name_that_no_file_can_have_are_one_line(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text()) | {"vlm_extra_tokens": {"image_token": "\ud800"}}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="config.json cannot be read: .*surrogates"):
        Captioner.from_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(json.dumps({"image": "x" * 5000, "text": "A."}))
    with pytest.raises(DataError, match="names the image xxx.* --images FOLDER"):
        open_source(str(tmp_path / "data.jsonl"), ReadOptions())
