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

pytestmark = pytest.mark.skipif(not LEVELS, reason="this machine has no kernels")


def squared_relu(self, x):
    return self.down_proj(F.relu(self.gate_proj(x)).square() * self.up_proj(x))


def exact_gelu(self, x):
    return self.dropout(self.fc2(F.gelu(self.fc1(x))))


def without_weight(self, x):
    return F.rms_norm(x, x.shape[-1:], eps=self.eps) * 1.5


def interleaved_rope(x, cos, sin):
    pairs = x.unflatten(-1, (-1, 2))
    turned = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
    return (x * cos + turned * sin).type_as(x)


def sharper(q, k, v, mask=None, causal=False, dropout_p=0.0):
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=0.3, enable_gqa=True)


def scaled_embedding(self, x, *args, **options):
    return ORIGINAL_FORWARD(self, x * 1.1, *args, **options)


ORIGINAL_FORWARD = language_model.LanguageModel.forward
EDITS = [  # of a file of the core: where, and what stands there then
    (language_model.MLP, "forward", squared_relu),
    (language_model.RMSNorm, "forward", without_weight),
    (language_model, "apply_rope", interleaved_rope),
    (language_model, "attention", sharper),
    (language_model.LanguageModel, "forward", scaled_embedding),
    (vision_transformer.MLP, "forward", exact_gelu),
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


CHANGES = [mlp_projector, hook, own_forward]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_kernels_are_used_where_nothing_was_edited(tiny_model, dtype, quantize, caplog):
    inference = InferenceModel(tiny_model().to(dtype), quantize=quantize)
    assert type(inference.network) is KernelNetwork and not caplog.records


def assert_modules_are_used(model, caplog):
    with caplog.at_level(logging.WARNING):
        inference = InferenceModel(model)
    assert type(inference.network) is PlainNetwork
    assert [record.message.partition(": ")[0] for record in caplog.records] == [
        "the model's modules are used instead of the faster kernels"
    ]
    torch.testing.assert_close(logits_of(inference), logits_of(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("place", "name", "edited"), EDITS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_edited_core_is_computed_by_its_modules(tiny_model, monkeypatch, caplog, place, name, edited, dtype):
    monkeypatch.setattr(place, name, edited)
    assert_modules_are_used(tiny_model().to(dtype), caplog)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_computed_by_its_modules(tiny_model, caplog, change):
    change(model := tiny_model())
    assert_modules_are_used(model, caplog)


def test_adapters_in_training_are_computed_by_modules_without_a_word(tiny_model, caplog):
    adapt(model := tiny_model(), 2, 4)
    assert type(InferenceModel(model).network) is PlainNetwork and not caplog.records


def run_edited(folder, path, old, new, *command, **environment):
    """Run Python with copies of the packages in folder, of which one file is edited."""
    for package in ("models", "nanovlm"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "generate.py", folder)
    text = (folder / path).read_text(encoding="utf-8")
    assert old in text
    (folder / path).write_text(text.replace(old, new), encoding="utf-8")
    runs = [
        subprocess.run(
            [sys.executable, *command], cwd=folder, env=os.environ | {"PYTHONPATH": str(folder), **extra},
            capture_output=True, text=True, check=True,
        )
        for extra in ({}, environment)
    ]  # fmt: skip
    return runs


def test_an_edit_of_the_files_counts_on_the_command_line(tmp_path):
    edit = "models/language_model.py", "F.silu(self.gate_proj(x))", "F.relu(self.gate_proj(x)).square()"
    fast, plain = run_edited(tmp_path, *edit, "generate.py", NANOVLM_CPU_LEVEL="none")
    unedited = subprocess.run([sys.executable, "generate.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert fast.stdout == plain.stdout != unedited.stdout
    assert fast.stderr.count("\n") == 1 and "modules are used instead of the faster kernels" in fast.stderr
    assert plain.stderr == unedited.stderr == ""


def test_an_edit_of_attention_counts_in_bfloat16_training(tmp_path):
    edit = "models/attention.py", "is_causal=causal,", "is_causal=causal, scale=0.1,"
    code = "from nanovlm.training import cpu_ops; print(cpu_ops._agrees())"
    edited, _ = run_edited(tmp_path, *edit, "-c", code)
    assert edited.stdout == "False\n" and "models/attention.py is used in training" in edited.stderr
    unedited = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert unedited.stdout == "True\n" and not unedited.stderr
