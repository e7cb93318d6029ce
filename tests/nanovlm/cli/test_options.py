"""Flags that several verbs share: wrong values, and models that cannot be loaded, are one line before any work."""

import argparse
import copy
import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from models.inference.quantization import QuantizedLinear
from models.lora import adapt
from models.lora.files import write_adapters
from nanovlm import EMBEDDED, SAMPLE, Captioner
from nanovlm.cli import main as cli
from nanovlm.cli.caption import GENERATION_FLAGS, MODEL_FLAGS
from nanovlm.cli.options import load_captioner, model_options, settings_of
from nanovlm.errors import NanoVLMError
from nanovlm.options import ModelOptions
from support.cli import assert_usage_error, flag_names

pytestmark = pytest.mark.usefixtures("workdir")

NO_MODEL = "must be a folder with config.json, or a Hub id"

WRONG_FLAGS = [
    "--max-new-tokens 0", "--max-new-tokens 1.5", "--temperature nan", "--top-p 1.1",
    "--seed -1", "--seed 9223372036854775808", "--repetition-penalty 0",
    "--max-tiles 0", "--device tpu", "--dtype int8", "--unknown\nflag", "--prompt", "--json=yes",
]  # fmt: skip


@pytest.mark.parametrize("flags", WRONG_FLAGS)
def test_wrong_flags_are_one_error_line_before_any_work(generate, flags):
    """Neither the model nor the image could be read."""
    shutil.copytree(EMBEDDED, "broken", ignore=lambda folder, names: set(names) - {"config.json"})
    result = generate("missing.png", *flags.split(" "), model="broken")
    assert_usage_error(result)
    assert flag_names(flags) & set(result[2].replace("=", " ").split())


WARM = {"temperature": 1.5, "seed": 4}
GENERATION = {  # field: its value, and the settings beside it, without and with which answers differ
    "repetition_penalty": (1.9, {}),
    "temperature": (1.5, {"seed": 4}),
    "top_p": (0.05, WARM),
    "seed": (98765, {"temperature": 1.5}),
    "max_new_tokens": (3, {}),
    "start_with": ("A photo of", {}),
}
MODEL = {  # field: its flag, and whether a captioner shows it
    "adapter": ("--adapter {folder}", lambda captioner: captioner.model.MP.proj.weight.abs().max() > 50),
    "model": ("--model {folder}", lambda captioner: captioner.model.cfg.vit_img_size == 16),
    "revision": ("--revision main", "has no revision 'main'"),
    "device": ("--device mps", "device=mps is not available"),
    "dtype": ("--dtype float16", lambda captioner: captioner.inference.dtype == torch.float16),
    "threads": ("--threads 2", lambda captioner: torch.get_num_threads() == 2),
    "quantize": ("--quantize int8", lambda captioner: has_module(captioner, QuantizedLinear)),
    "max_tiles": ("--max-tiles 2", lambda captioner: n_tiles(captioner, (64, 64)) == 1),
}


def has_module(captioner, kind):
    return any(isinstance(module, kind) for module in captioner.inference.network.model.modules())


def n_tiles(captioner, size):
    return len(captioner.prepare(Image.new("RGB", size))[1][0])


def flags_of(settings):
    words = []
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


def fields_with_flags(record):
    return {f.name for f in settings_of(record)}


def test_every_flag_is_in_these_tables():
    assert set(GENERATION_FLAGS) == GENERATION.keys() and fields_with_flags(ModelOptions) == MODEL.keys()


@pytest.mark.parametrize("name", GENERATION)
def test_generation_flag_changes_the_answer(name, generate, random_captioner):
    """The answer is that of the Python keyword, and another one than without the flag."""
    value, others = GENERATION[name]
    settings = {"max_new_tokens": 12} | others
    ask = ["good.png", "--prompt", "What?", *flags_of(settings)]
    answer = random_captioner.caption("good.png", "What?", **settings | {name: value})
    assert generate(*ask, *flags_of({name: value}))[1] == " ".join(answer.splitlines()) + "\n" != generate(*ask)[1]


@pytest.mark.parametrize("name", MODEL)
def test_model_flag_changes_the_captioner(name, tiled, tmp_path, request):
    flags, effect = MODEL[name]
    Captioner(*tiled).save_pretrained(tmp_path / "tiled")
    adapted = copy.deepcopy(tiled[0])
    adapt(adapted, 2, 4, ["MP"])
    torch.nn.init.constant_(adapted.MP.proj.lora_B.weight, 1e4)
    write_adapters(tmp_path / "tiled", adapted)
    argv = ["--threads", "1", "--model", str(tmp_path / "tiled"), *flags.format(folder=tmp_path / "tiled").split()]
    verbs = ["evaluate", *["caption", "chat"] * (name in MODEL_FLAGS)]
    options = {verb: parse_model_options(verb, argv) for verb in verbs}
    assert len({replace(o, threads=1) for o in options.values()}) == 1
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    if isinstance(effect, str):
        with pytest.raises(NanoVLMError, match=effect):
            load_captioner(options["evaluate"])
        return
    assert effect(load_captioner(options["evaluate"]))
    plain = parse_model_options("evaluate", argv[2 * (name == "threads") : 2 + 2 * (name != "model")])
    assert not effect(load_captioner(replace(plain, threads=1)))


def parse_model_options(verb, argv):
    parser = argparse.ArgumentParser()
    argv = argv[2:] if verb in ("caption", "chat") else argv  # which have no --threads
    cli.import_verb(verb).add_flags(parser)
    data = ["--data", "scenes"] if verb == "evaluate" else []
    return model_options(parser.parse_args([*argv, *data]))


def test_embedded_model_prints_its_limits_once_for_own_images(generate):
    code, out, err = generate("good.png", "fine.jpg", model=None)
    assert code == 0 and len(err.splitlines()) == 1 and "drawn scenes" in err and "--model" in err
    assert (code, out, "") == generate("good.png", "fine.jpg", model=EMBEDDED), "no note with --model"
    assert generate(model=None) == generate(SAMPLE, model=EMBEDDED), "its own sample needs no note"


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--prompt", "word " * 1100, "lm_max_position_embeddings=1024"),  # too long for any image
        ("--max-new-tokens", "1020", "lm_max_position_embeddings=1024"),
        ("--prompt", "a\udcff", "not valid Unicode text"),
        *[("--model", name, NO_MODEL) for name in ("nowhere", "good.png", "two\nlines")],
    ],
    ids=lambda text: text[:12],
)
def test_a_value_that_no_model_takes_is_one_error_line(generate, flag, value, words):
    assert_usage_error(generate("good.png", flag, value), words)


def edit_config(folder, **settings):
    """A folder's config.json with other settings."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | settings))


def resize_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    weights["decoder.blocks.1.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(weights, folder / "model.safetensors")


BAD_MODELS = {  # one of each kind of file; tests/models and test_tokenizer.py have the others
    "no config": (lambda folder: (folder / "config.json").unlink(), [NO_MODEL]),
    "misfit": (resize_a_tensor, ["decoder.blocks.1.mlp.up_proj.weight", "(3, 5)", "(512, 192)"]),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{\n"), ["tokenizer.json"]),
    "failing template": (lambda folder: edit_config(folder, lm_chat_template="{{ 1 / 0 }}"), ["lm_chat_template"]),
}


@pytest.mark.parametrize("what", BAD_MODELS)
def test_broken_model_folder_is_one_error_line(generate, model_folder, tmp_path, what):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    spoil, words = BAD_MODELS[what]
    spoil(folder)
    assert_usage_error(generate("good.png", model=folder), *words)


def test_unknown_config_keys_are_one_note(generate, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    edit_config(folder, lm_eos_token_id=0, brand_new=[1])
    code, out, err = generate("good.png", model=folder)
    assert (code, out) == generate("good.png")[:2]
    assert len(err.splitlines()) == 1 and err.startswith("note: ") and "brand_new" in err
    assert "lm_eos_token_id" not in err  # files of every version have it, and nothing needs it
