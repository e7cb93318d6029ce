"""Flags that several verbs share: each changes what its field says; models that cannot be loaded are one line."""

import argparse
from pathlib import Path

import pytest
import torch
from PIL import Image

from models.inference.quantization import QuantizedLinear
from models.lora import adapt
from models.lora.files import write_adapters
from nanovlm import EMBEDDED, SAMPLE, Captioner
from nanovlm.cli import main as cli
from nanovlm.cli.caption import GENERATION_FLAGS, MODEL_FLAGS
from nanovlm.cli.options import load_captioner, model_options, settings_of
from nanovlm.errors import NanoVLMError
from nanovlm.options import ModelOptions
from support.cli import assert_usage_error

pytestmark = pytest.mark.usefixtures("workdir")

GENERATION = {  # field: its value, and the flags beside it, without and with which answers differ
    "repetition_penalty": (1.9, {}),
    "temperature": (1.5, {"seed": 4}),
    "top_p": (0.05, {"temperature": 1.5, "seed": 4}),
    "seed": (98765, {"temperature": 1.5}),
    "max_new_tokens": (3, {}),
    "start_with": ("A photo of", {}),
}
MODEL = {  # field: its value, and whether a captioner shows it
    "adapter": ("adapters", lambda captioner: captioner.model.MP.proj.weight.abs().max() > 50),
    "model": ("tiled", lambda captioner: captioner.model.cfg.vit_img_size == 16),
    "revision": ("main", "has no revision 'main'"),
    "device": ("mps", "device=mps is not available"),
    "dtype": ("float16", lambda captioner: captioner.inference.dtype == torch.float16),
    "threads": ("2", lambda captioner: torch.get_num_threads() == 2),
    "quantize": ("int8", lambda captioner: QuantizedLinear in map(type, captioner.inference.network.model.modules())),
    "max_tiles": ("2", lambda captioner: len(captioner.prepare(Image.new("RGB", (64, 64)))[1][0]) == 1),
}  # fmt: skip


def flag(name, value):
    return [f"--{name.replace('_', '-')}", str(value)]


def test_every_flag_is_in_these_tables():
    assert set(GENERATION_FLAGS) == GENERATION.keys()
    assert {f.name for f in settings_of(ModelOptions)} == MODEL.keys()


@pytest.mark.parametrize("name", GENERATION)
def test_generation_flag_changes_the_answer(name, generate, random_captioner):
    """The answer is that of the Python keyword, and another one than without the flag."""
    value, others = GENERATION[name]
    settings = {"max_new_tokens": 12} | others
    ask = ["good.png", "--prompt", "What?", *(word for pair in settings.items() for word in flag(*pair))]
    answer = random_captioner.caption("good.png", "What?", **settings | {name: value})
    assert generate(*ask, *flag(name, value))[1] == " ".join(answer.splitlines()) + "\n" != generate(*ask)[1]


@pytest.fixture
def one_thread_afterwards():
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)


@pytest.mark.parametrize("name", MODEL)
def test_model_flag_changes_the_captioner(name, tiled, one_thread_afterwards):
    """Without the flag the captioner does not show it; each verb that has the flag parses it alike."""
    value, effect = MODEL[name]
    captioner = Captioner(*tiled)
    captioner.save_pretrained("tiled")
    adapted = Captioner.from_pretrained("tiled", "cpu", "float32").model
    adapt(adapted, 2, 4, ["MP"])
    torch.nn.init.constant_(adapted.MP.proj.lora_B.weight, 1e4)
    Path("adapters").mkdir()
    write_adapters(Path("adapters"), adapted)

    def options(verb, *argv):
        cli.import_verb(verb).add_flags(parser := argparse.ArgumentParser())
        return model_options(parser.parse_args([*argv, *(["--data", "scenes"] if verb == "evaluate" else [])]))

    base = [] if name == "model" else ["--model", "tiled"]
    changed = options("evaluate", *base, *flag(name, value))
    for verb in ("caption", "chat") if name in MODEL_FLAGS else ():
        assert options(verb, *base, *flag(name, value)) == changed
    if isinstance(effect, str):
        with pytest.raises(NanoVLMError, match=effect):
            load_captioner(changed)
        return
    assert not effect(load_captioner(options("evaluate", *base)))
    assert effect(load_captioner(changed))


def test_embedded_model_prints_its_limits_once_for_own_images(generate):
    code, out, err = generate("good.png", "fine.jpg", model=None)
    assert code == 0 and len(err.splitlines()) == 1 and "drawn scenes" in err and "--model" in err
    assert (code, out, "") == generate("good.png", "fine.jpg", model=EMBEDDED), "no note with --model"
    for own in ((), (SAMPLE,)):
        assert generate(*own, model=None) == generate(SAMPLE, model=EMBEDDED), "its own sample needs no note"


NO_MODEL = "must be a folder with config.json, or a Hub id"
UNFIT = [  # a flag that no model takes, its value, words of the error
    ("--prompt", "word " * 1100, "lm_max_position_embeddings=1024"),  # too long for any image
    ("--max-new-tokens", "1020", "lm_max_position_embeddings=1024"),
    ("--prompt", "a\udcff", "not valid Unicode text"),
    *[("--model", name, NO_MODEL) for name in ("nowhere", "good.png", "two\nlines")],
]


@pytest.mark.parametrize(("flag", "value", "words"), UNFIT, ids=lambda text: ascii(text[:12]))
def test_a_value_that_no_model_takes_is_one_error_line(generate, flag, value, words):
    assert_usage_error(generate("good.png", flag, value), words)


def test_unknown_config_keys_are_one_note(generate, changed_model):
    code, out, err = generate("good.png", model=changed_model(lm_eos_token_id=0, brand_new=[1]))
    assert (code, out) == generate("good.png")[:2]
    assert len(err.splitlines()) == 1 and err.startswith("note: ") and "brand_new" in err
    assert "lm_eos_token_id" not in err  # files of every version have it, and nothing needs it
