"""The command line as fixtures, run in this process with a small random model."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from models.common.options import SamplingParams
from nanovlm import PROMPT, Captioner
from nanovlm.cli import main as cli
from support import noise_image
from support.checkpoints import BASE_SIZE, EMBEDDING, HEAD, INV_FREQ, SPECIAL, raw_config, read_nanovlm, stock_shapes
from support.cli import FAST_FLAGS, IMAGE_NAMES
from support.smolvlm import make_tokenizer


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """Run the test in an empty folder of its own with two images, good.png and fine.jpg."""
    monkeypatch.chdir(tmp_path)
    noise_image(seed=1).save("good.png")
    noise_image(90, 130, seed=2).save("fine.jpg", quality=95)
    return tmp_path


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Run a root script of one verb, or `nanovlm` (None), in this process: exit code, stdout, stderr."""

    def run_script(script, verb, *argv):
        monkeypatch.setattr(sys, "argv", [script])
        try:
            argv = list(map(str, argv))
            code = cli.main(argv) if verb is None else cli.run_verb(verb, argv)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run_script


@pytest.fixture
def generate(model_folder, run_script):
    """Run generate.py, with `model_folder` unless given another."""

    def generate(*argv, model=model_folder):
        return run_script("generate.py", "caption", *FAST_FLAGS, *(["--model", model] if model else []), *argv)

    return generate


@pytest.fixture
def train(run_script):
    return partial(run_script, "train.py", "train")


@pytest.fixture(scope="session")
def random_captioner(model_folder):
    return Captioner.from_pretrained(model_folder, "cpu", "float32")


@pytest.fixture
def captions_of(random_captioner):
    """Generate n captions of an image with `model_folder`, by the Python API."""

    def captions_of(image, prompt=PROMPT, n=1, **sampling):
        return random_captioner.samples(image, prompt, n, max_new_tokens=6, sampling=SamplingParams(**sampling))

    captions_of.captioner = random_captioner
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


@pytest.fixture(scope="session")
def backbone_tokenizer(tmp_path_factory):
    """A folder with a tokenizer like SmolLM2's, without image tokens, which lm_tokenizer names."""
    backend = make_tokenizer(added=[], special=SPECIAL)
    filler = BASE_SIZE - backend.get_vocab_size()
    backend.add_special_tokens([f"<filler_{i}>" for i in range(filler)])
    assert backend.get_vocab_size() == BASE_SIZE and [backend.token_to_id(token) for token in SPECIAL[:3]] == [0, 1, 2]
    folder = tmp_path_factory.mktemp("lent")
    backend.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    words |= {"additional_special_tokens": SPECIAL[1:3], "unk_token": "<|endoftext|>", "chat_template": "none"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


@pytest.fixture(scope="session")
def make_checkpoint(backbone_tokenizer, tmp_path_factory):
    """Write a random checkpoint of a version, in the format of the published ones."""

    def make(format_version):
        folder = tmp_path_factory.mktemp(f"v{format_version}")
        raw = raw_config(format_version) | {"lm_tokenizer": str(backbone_tokenizer)}
        (folder / "config.json").write_text(json.dumps(raw, indent=4))
        chance = torch.Generator().manual_seed(format_version)
        state = {}
        for name, shape in sorted(stock_shapes(read_nanovlm(raw)).items()):
            noise = torch.randn(shape, generator=chance)
            state[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * 1.5 * noise[0].numel() ** -0.5
        del state[EMBEDDING]
        state[INV_FREQ] = 1.0 / raw["lm_re_base"] ** (torch.arange(0, 4, 2).float() / 4)
        save_file(state, folder / "model.safetensors", {"format": "pt", EMBEDDING: HEAD})
        return folder

    return make


@pytest.fixture
def without_heif(monkeypatch):
    """State of a process that has read no HEIC image yet."""
    Image.init()  # or the end of the test would forget the formats that it is the first to read
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    monkeypatch.setattr(Image, "ID", [format for format in Image.ID if format != "HEIF"])
