"""The command line as fixtures, with a small model."""

import sys
from pathlib import Path

import pytest

from models.decoding import SamplingParams
from nanovlm import PROMPT, Captioner
from nanovlm.cli import main as cli
from support import noise
from support.cli import NAMES, SHORT


@pytest.fixture
def standing(tmp_path, monkeypatch):
    """Every test stands in a folder of its own with two good pictures; no Hub can be reached."""
    monkeypatch.chdir(tmp_path)
    noise(seed=1).save("good.png")
    noise(90, 130, seed=2).save("fine.jpg", quality=95)


@pytest.fixture
def generate(model_folder, monkeypatch, capsys):
    """generate.py in this process, with the tests' model unless another is named: exit code, stdout, stderr."""

    def generate(*argv, model=model_folder):
        monkeypatch.setattr(sys, "argv", ["generate.py"])
        named = ["--model", str(model)] if model else []
        try:
            code = cli.run_verb("caption", [*SHORT, *named, *map(str, argv)])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return generate


@pytest.fixture
def train(monkeypatch, capsys):
    """train.py likewise."""

    def train(*argv):
        monkeypatch.setattr(sys, "argv", ["train.py"])
        try:
            code = cli.run_verb("train", argv)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return train


@pytest.fixture(scope="module")
def said(model_folder):
    """What the model says of pictures, asked through the library."""
    captioner = Captioner.from_pretrained(model_folder, "cpu", "float32")

    def said(picture, prompt=PROMPT, n=1, **sampling):
        return captioner.samples(picture, prompt, n, max_new_tokens=6, sampling=SamplingParams(**sampling))

    return said


@pytest.fixture
def folder(standing):
    """Five pictures of several kinds and sizes, some in folders of the folder; and what is no picture."""
    for seed, name in enumerate(NAMES):
        path = Path("pictures", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        noise(40 + 30 * seed, 90 - 10 * seed, seed).save(path)
    Path("pictures/notes.md").write_text("no picture")
    return Path("pictures")
