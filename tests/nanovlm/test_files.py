"""A model's files that are strange, or drives that refuse what others can: one line, or nothing lost."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.formats.base import llama_settings
from nanovlm import SAMPLE, Captioner
from support.cli import run_program

FLOAT8 = torch.float8_e4m3fn


def stored(change):
    """Store other tensors in model.safetensors."""

    def damage(folder):
        path = folder / "model.safetensors"
        state = {name: tensor.clone() for name, tensor in load_file(path).items()}
        save_file(change(state), path, {"format": "pt"})

    return damage


def float8(state, matrices_only=False):
    return {name: t.to(FLOAT8) if t.dim() > 1 or not matrices_only else t for name, t in state.items()}


def with_scales(state):
    scales = {f"{name}_scale": torch.ones(1) for name, t in state.items() if t.dim() == 2}
    return float8(state, matrices_only=True) | scales


def cut_short(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def quantized(folder):
    stored(with_scales)(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, "model.safetensors cannot be read, it may be truncated"),
        (stored(float8), "is stored as torch.float8_e4m3fn, not as floating-point numbers of 16 bits or more"),
        (stored(lambda state: float8(state, True)), "is stored as torch.float8_e4m3fn"),
        (quantized, "config.json has a quantization_config: take the model in 16 bits"),
    ],
)
def test_weights_that_cannot_be_read_are_one_line(model_folder, generate, tmp_path, damage, words, dtype):
    damage(folder := shutil.copytree(model_folder, tmp_path / "model"))
    code, out, err = generate(str(SAMPLE), "--dtype", dtype, model=folder)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1, err


def test_a_model_cut_short_is_one_line_of_the_program(model_folder, tmp_path):
    cut_short(folder := shutil.copytree(model_folder, tmp_path / "model"))
    run = run_program("--model", str(folder), str(SAMPLE))
    assert run.returncode == 2 and run.stdout == b"" and run.stderr.count(b"\n") == 1 and b"truncated" in run.stderr


def test_a_llama_without_rms_norm_eps_has_transformers_default():
    assert llama_settings("config.json", {})["lm_rms_eps"] == 1e-6


def test_a_drive_that_refuses_chmod_loses_nothing(random_captioner, model_folder, generate, tmp_path, monkeypatch):
    def refuses(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    for owner, name in ((os, "chmod"), (os, "fchmod"), (os, "lchmod"), (Path, "chmod"), (os, "fsync")):
        monkeypatch.setattr(owner, name, refuses, raising=False)
    shutil.copyfile(SAMPLE, tmp_path / "a.png")
    for output, flags in (("a.txt", ()), ("all.jsonl", ("--out", str(tmp_path / "all.jsonl")))):
        code, _, err = generate(str(tmp_path), *flags)
        assert code == 0 and (tmp_path / output).stat().st_size > 0, err
    random_captioner.save_pretrained(tmp_path / "model")
    assert Captioner.from_pretrained(tmp_path / "model", "cpu", "float32").caption(SAMPLE, max_new_tokens=2)
