"""The command line as fixtures, run in this process with a small random model."""

import sys
from pathlib import Path

import pytest

from models.decoding import SamplingParams
from nanovlm import PROMPT, Captioner
from nanovlm.cli import main as cli
from support import noise_image
from support.cli import FAST_FLAGS, IMAGE_NAMES


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """Run the test in an empty folder of its own with two images, good.png and fine.jpg."""
    monkeypatch.chdir(tmp_path)
    noise_image(seed=1).save("good.png")
    noise_image(90, 130, seed=2).save("fine.jpg", quality=95)
    return tmp_path


@pytest.fixture
def generate(model_folder, monkeypatch, capsys):
    """Run generate.py in this process, with `model_folder` unless given another: exit code, stdout, stderr."""

    def generate(*argv, model=model_folder):
        monkeypatch.setattr(sys, "argv", ["generate.py"])
        named = ["--model", str(model)] if model else []
        try:
            code = cli.run_verb("caption", [*FAST_FLAGS, *named, *map(str, argv)])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return generate


@pytest.fixture
def train(monkeypatch, capsys):
    """Run train.py in this process: exit code, stdout, stderr."""

    def train(*argv):
        monkeypatch.setattr(sys, "argv", ["train.py"])
        try:
            code = cli.run_verb("train", list(map(str, argv)))
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return train


@pytest.fixture(scope="module")
def captions_of(model_folder):
    """Generate n captions of an image with `model_folder`, by the Python API."""
    captioner = Captioner.from_pretrained(model_folder, "cpu", "float32")

    def captions_of(image, prompt=PROMPT, n=1, **sampling):
        return captioner.samples(image, prompt, n, max_new_tokens=6, sampling=SamplingParams(**sampling))

    captions_of.captioner = captioner
    return captions_of


@pytest.fixture
def image_folder(workdir):
    """The folder `images` with five images of several formats and sizes, some in subfolders, and a text file."""
    for seed, name in enumerate(IMAGE_NAMES):
        path = Path("images", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        noise_image(40 + 30 * seed, 90 - 10 * seed, seed).save(path)
    Path("images/notes.md").write_text("no image")
    return Path("images")


@pytest.fixture(scope="session")
def embedded():
    return Captioner.from_pretrained(device="cpu", dtype="float32")
