"""A model's files that are strange, or drives that refuse what others can: one line, or nothing lost."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovlm import SAMPLE, Captioner


def damaged(folder, how):
    """Cut the weights short, or store all of them or the matrices, with scales or without, as float8."""
    path, config = folder / "model.safetensors", folder / "config.json"
    if how == "cut":
        return os.truncate(path, path.stat().st_size // 2)
    state = {
        name: t.to(torch.float8_e4m3fn) if t.dim() > 1 or how == "all" else t.clone()
        for name, t in load_file(path).items()
    }
    if how == "scales":
        state |= {f"{name}_scale": torch.ones(1) for name, t in state.items() if t.dim() == 2}
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    save_file(state, path, {"format": "pt"})


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", "model.safetensors cannot be read, it may be truncated"),
        ("all", "is stored as torch.float8_e4m3fn, not as floating-point numbers of 16 bits or more"),
        ("scales", "config.json has a quantization_config: take the model in 16 bits"),
    ],
)
def test_weights_that_cannot_be_read_are_one_line(model_folder, generate, tmp_path, how, words, dtype):
    damaged(folder := shutil.copytree(model_folder, tmp_path / "model"), how)
    code, out, err = generate(str(SAMPLE), "--dtype", dtype, model=folder)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1, err


def test_a_drive_that_refuses_chmod_loses_nothing(random_captioner, model_folder, generate, tmp_path, monkeypatch):
    def refuses(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    for owner, name in ((os, "chmod"), (os, "fchmod"), (os, "lchmod"), (Path, "chmod"), (os, "fsync")):
        monkeypatch.setattr(owner, name, refuses, raising=False)
    shutil.copyfile(SAMPLE, tmp_path / "a.png")
    (tmp_path / "all.jsonl").write_text('{"file_name": "a.png", "text": ""}\n')  # a row to be replaced
    for output, flags in (("a.txt", ()), ("all.jsonl", ("--out", str(tmp_path / "all.jsonl")))):
        code, _, err = generate(str(tmp_path), *flags)
        assert code == 0 and (tmp_path / output).stat().st_size > 0, err
    random_captioner.save_pretrained(tmp_path / "model")
    assert Captioner.from_pretrained(tmp_path / "model", "cpu", "float32").caption(SAMPLE, max_new_tokens=2)
