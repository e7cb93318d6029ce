"""Coverage-guided fuzzing, and what it has found. processing/test_image_processing.py damages images."""

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
@pytest.mark.parametrize(
    "name", ["config", "tokenizer", "header", "template", "image", "json", "jsonl", "csv", "requests"]
)
def test_two_minutes_of_fuzzing_find_nothing(name):
    pytest.importorskip("atheris")
    command = [sys.executable, "-m", "tests.fuzz", name, "--minutes", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    assert run.returncode == 0 and "Done " in run.stderr, run.stdout + run.stderr[-3000:]


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("tokenizer", {"decoder": {"type": "Strip", "content": " ", "start": 2**64 - 5, "stop": 0}}, "tokenizer.json"),
        ("tokenizer", {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "?"}}, "tokenizer.json"),
        ("config", {"vlm_extra_tokens": {"image_token": "\ud800"}}, "config.json cannot be read: .*surrogates"),
    ],
    ids=["a panic, which is no Exception", "a bare Exception", "half a character, which no file can hold"],
)
def test_a_file_on_which_a_library_fails_is_one_line(model_folder, tmp_path, file, change, words):
    shutil.copytree(model_folder, tmp_path / "model")
    file = tmp_path / f"model/{file}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        Captioner.from_pretrained(tmp_path / "model")


def test_a_name_that_no_file_can_have_is_one_line(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"image": "x" * 5000, "text": "A."}))
    with pytest.raises(DataError, match="names the image xxx.* --images FOLDER"):
        open_source(str(tmp_path / "data.jsonl"), ReadOptions())
