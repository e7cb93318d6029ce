"""An edit of the core counts in every answer: the kernels are used only where they compute what the modules do."""

import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import language_model, vision_transformer
from models.inference.inference_model import InferenceModel, PlainNetwork
from models.inference.kernel_network import KernelNetwork
from models.lora import adapt
from support import ROOT
from support.generation import logits_of
from support.kernels import LEVELS

DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.skipif(not LEVELS, reason="this machine has no kernels")


def interleaved_rope(x, cos, sin):
    pairs = x.unflatten(-1, (-1, 2))
    turned = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
    return (x * cos + turned * sin).type_as(x)


def sharper(q, k, v, mask=None, causal=False, dropout_p=0.0):
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=0.3, enable_gqa=True)


def scaled(self, x, *args, **options):
    return ORIGINAL_FORWARD(self, x * 1.1, *args, **options)


ORIGINAL_FORWARD = language_model.LanguageModel.forward
EDITS = [  # of a file of the core: where, and what stands there then
    (language_model.MLP, "forward", lambda self, x: self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))),
    (language_model.RMSNorm, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], eps=self.eps) * 1.5),
    (language_model, "apply_rope", interleaved_rope),
    (language_model, "attention", sharper),
    (language_model.LanguageModel, "forward", scaled),
    (vision_transformer.MLP, "forward", lambda self, x: self.fc2(F.gelu(self.fc1(x)))),
    (vision_transformer, "attention", sharper),
]


def mlp_projector(model):
    width = model.cfg.lm_hidden_dim
    model.MP.proj = nn.Sequential(model.MP.proj, nn.GELU(), nn.Linear(width, width))


def hook(model):
    model.decoder.blocks[-1].register_forward_hook(lambda module, inputs, output: (output[0] * 1.1, output[1]))


def own_forward(model):
    mlp = model.decoder.blocks[1].mlp
    mlp.forward = lambda x: mlp.down_proj(x.new_zeros(*x.shape[:-1], model.cfg.lm_inter_dim))


CHANGES: list = [(edit, lambda model, dtype=dtype: model.to(dtype)) for edit in EDITS for dtype in DTYPES]
CHANGES += [(None, change) for change in (mlp_projector, hook, own_forward)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_kernels_are_used_where_nothing_was_edited(tiny_model, dtype, quantize, caplog):
    inference = InferenceModel(tiny_model().to(dtype), quantize=quantize)
    assert type(inference.network) is KernelNetwork and not caplog.records


@pytest.mark.parametrize(("edit", "change"), CHANGES)
def test_an_edited_model_is_computed_by_its_modules(tiny_model, monkeypatch, caplog, edit, change):
    if edit is not None:
        monkeypatch.setattr(*edit)
    change(model := tiny_model())
    with caplog.at_level(logging.WARNING):
        inference = InferenceModel(model)
    assert type(inference.network) is PlainNetwork
    (record,) = caplog.records
    assert record.message.startswith("the model's modules are used instead of the faster kernels: ")
    torch.testing.assert_close(logits_of(inference), logits_of(model), rtol=1e-4, atol=1e-4)


def test_adapters_in_training_are_computed_by_modules_without_a_word(tiny_model, caplog):
    adapt(model := tiny_model(), 2, 4)
    assert type(InferenceModel(model).network) is PlainNetwork and not caplog.records


def test_an_edit_of_the_files_counts_on_the_command_line_and_in_bfloat16_training(tmp_path):
    def python(folder, *command, **environment):
        environment = os.environ | {"PYTHONPATH": str(folder), **environment}
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout, done.stderr

    for package in ("models", "nanovlm"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "generate.py", tmp_path)
    for file, old, new in (
        ("language_model", "F.silu(self.gate_proj(x))", "F.relu(self.gate_proj(x)).square()"),
        ("attention", "is_causal=causal,", "is_causal=causal, scale=0.1,"),
    ):
        path = tmp_path / f"models/{file}.py"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
    fast, plain = python(tmp_path, "generate.py"), python(tmp_path, "generate.py", NANOVLM_CPU_LEVEL="none")
    assert fast[0] == plain[0] != python(ROOT, "generate.py")[0]
    assert fast[1].count("\n") == 1 and "modules are used instead of the faster kernels" in fast[1] and not plain[1]
    agrees = "from nanovlm.training import cpu_ops; print(cpu_ops._agrees())"
    said, warned = python(tmp_path, "-c", agrees)
    assert said == "False\n" and "models/attention.py is used in training" in warned
    assert python(ROOT, "-c", agrees) == ("True\n", "")
