"""The kernels are used only for the lines of the core that they were written for."""

import ast
import compileall
import copy
import functools
import logging
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from models import attention, cache, decoding, language_model, vision_transformer
from models.common.errors import InputError
from models.inference import proof
from models.inference.continuous_batching import ContinuousBatch, Request
from models.inference.inference_model import InferenceModel, PlainNetwork
from models.inference.kernel_network import KernelNetwork
from models.lora import adapt
from nanovlm import SAMPLE, Captioner
from nanovlm.training import cpu_ops
from support import ROOT
from support.edits import EDITS
from support.generation import logits_of, run
from support.kernels import LEVELS

DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.skipif(not LEVELS, reason="this machine has no kernels")


def sharper(q, k, v, mask=None, causal=False, dropout_p=0.0):
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=0.3, enable_gqa=True)


def reloaded(module, name, old, new):
    """A method of a module whose file was edited when its source had been read already, as in a notebook."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    exec(compile(text.replace(old, new), module.__file__, "exec"), values := {"__name__": module.__name__})
    return vars(values[name])["forward"]


def faked(function):
    return functools.wraps(function)(lambda x, *args, **options: function(0.3 * x, *args, **options))


class Halved(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result / 2 if function is F.linear else result


def mlp_projector(model):
    width = model.cfg.lm_hidden_dim
    model.MP.proj = nn.Sequential(model.MP.proj, nn.GELU(), nn.Linear(width, width))


def own_forward(model):
    mlp = model.decoder.blocks[1].mlp
    mlp.forward = lambda x: mlp.down_proj(x.new_zeros(*x.shape[:-1], model.cfg.lm_inter_dim))


def last_block(model):
    return model.decoder.blocks[-1]


def replaced(path, **parts):
    def change(model):
        for name, part in parts.items():
            setattr(model.get_submodule(path), name, copy.deepcopy(part))

    return change


WIDER = nn.Linear(24, 640, bias=False)
CHANGES = {  # of a model, and what the line names
    "hook": (
        lambda m: m.decoder.blocks[0].register_forward_hook(lambda module, inputs, output: (-output[0], output[1])),
        "decoder.blocks.0 has a hook",
    ),
    "hook of a linear layer": (
        lambda m: last_block(m).mlp.up_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.1,)),
        "decoder.blocks.1.mlp.up_proj has a hook",
    ),
    "function": (own_forward, "decoder.blocks.1.mlp has forward of its own"),
    "attend": (lambda m: setattr(last_block(m).attn, "attend", sharper), "decoder.blocks.1.attn.attend is not"),
    "subclass": (
        lambda m: setattr(last_block(m), "mlp", type("Mine", (language_model.MLP,), {})(m.cfg).to(m.dtype)),
        "decoder.blocks.1.mlp is a Mine, not a MLP",
    ),
    "projector": (mlp_projector, "MP.proj is a Sequential, not a Linear"),
    "number": (lambda m: setattr(last_block(m).norm1, "eps", 0.5), "decoder.blocks.1.norm1.eps is not the config's"),
    "blocks": (
        lambda m: m.vision_encoder.blocks.append(m.vision_encoder.blocks[0]),
        "vision_encoder.blocks.length is not the config's",
    ),
    # the kernels would read and write beyond the memory that the config's sizes need
    "wider decoder": (
        replaced("decoder.blocks.0.mlp", gate_proj=WIDER, up_proj=WIDER, down_proj=nn.Linear(640, 24, bias=False)),
        "decoder.blocks.0.mlp.down_proj.in_features is not the config's",
    ),
    "wider encoder": (
        replaced("vision_encoder.blocks.0.mlp", fc1=nn.Linear(16, 640), fc2=nn.Linear(640, 16)),
        "vision_encoder.blocks.0.mlp.fc2.in_features is not the config's",
    ),
    "bias": (  # which F.linear adds to all columns
        replaced("vision_encoder.blocks.0.mlp.fc1", bias=nn.Parameter(torch.tensor([0.5]))),
        "vision_encoder.blocks.0.mlp.fc1.bias is not the config's",
    ),
    "vocabulary": (
        replaced("decoder.head", weight=nn.Parameter(torch.randn(4000, 24))),
        "decoder.head.weight is not the config's",
    ),
    "norm without bias": (
        replaced("vision_encoder.blocks.0", ln1=nn.LayerNorm(16, eps=1e-6, bias=False)),
        "vision_encoder.blocks.0.ln1.bias is not the config's",
    ),
    "parametrization": (
        lambda m: nn.utils.parametrizations.spectral_norm(m.MP.proj), "MP.proj is a ParametrizedLinear"
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_kernels_are_used_where_nothing_was_edited_and_for_adapters_modules(tiny_model, dtype, quantize, caplog):
    inference = InferenceModel(model := tiny_model().to(dtype), quantize=quantize)
    model.note = "an attribute that no function of the core reads"
    assert type(inference.network) is KernelNetwork
    adapt(model, 2, 4)
    assert quantize or type(inference.network) is PlainNetwork
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in EDITS if name != "a word never said"])
def test_an_edited_core_is_computed_by_its_modules(tiny_model, monkeypatch, caplog, name, dtype):
    edit = EDITS[name]
    edit.patch(monkeypatch)
    model = tiny_model(lm_vocab_size=304).to(dtype)  # of which one edit forbids the last
    with caplog.at_level(logging.WARNING):
        inference = InferenceModel(model)
    assert type(inference.network) is PlainNetwork
    assert [record.message for record in caplog.records] == [
        f"the model's modules are used instead of the faster kernels: models/{edit.file}.py is edited or patched"
    ]
    torch.testing.assert_close(logits_of(inference), logits_of(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_changed_model_is_computed_by_its_modules_before_and_after_loading(tiny_model, caplog, name, quantize):
    change, reason = CHANGES[name]
    inference = InferenceModel(model := tiny_model(lm_tie_weights=False), quantize=quantize)
    before = logits_of(inference)
    change(model)
    if quantize and name == "function":
        model.decoder.blocks[1].mlp.up_proj.forward = model.decoder.blocks[1].mlp.up_proj.forward
        with pytest.raises(InputError, match="up_proj has a forward of its own"):
            _ = inference.network
        return
    with caplog.at_level(logging.WARNING):
        after, new = logits_of(inference), logits_of(InferenceModel(model, quantize=quantize))
    assert [reason in record.message for record in caplog.records] == [True, True]
    torch.testing.assert_close(after, new)
    if quantize is None:
        torch.testing.assert_close(after, logits_of(model), rtol=1e-4, atol=1e-4)
    if name not in ("subclass", "parametrization"):
        assert not torch.allclose(after[:, : before.size(1)], before, atol=1e-3)


def test_patches_and_hooks_of_all_modules_count_at_the_next_prefill_and_until_they_go(tiny_model, monkeypatch):
    inferences = [InferenceModel(tiny_model(), quantize=quantize) for quantize in (None, "int8")]
    inferences[1].release_source()
    patches = [
        (nn.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias) * 1.1, True),
        (language_model.F, "silu", F.relu, True),
        (language_model, "apply_rope", lambda x, cos, sin: x, True),
        (vision_transformer, "attention", sharper, True),
        (language_model.Block, "__call__", lambda self, *args: self.forward(*args), False),
        (language_model, "PACK_STRIDE", 7, True),
        (attention, "F", object(), True),
        (language_model.MLP, "forward", reloaded(language_model, "MLP", "F.silu(", "F.relu("), True),
        (cache.KVCache, "append", lambda self, key, value: self, False),
        (decoding.GenerationMixin.decode, "__defaults__", (None,), True),
        (F, "scaled_dot_product_attention", faked(F.scaled_dot_product_attention), True),
        (F, "silu", faked(F.silu), True),
        (F, "linear", faked(F.linear), True),
        (torch, "cat", torch.stack, True),
        (torch.Tensor, "chunk", lambda x, *args, **options: torch.Tensor.split(x, 1), False),
        (nn.Linear, "forward", faked(nn.Linear.forward), True),
        (nn.LayerNorm, "forward", faked(nn.LayerNorm.forward), True),
        (nn.Module, "__call__", faked(nn.Module.__call__), True),
    ]
    changes = [lambda context, patch=patch: context.setattr(*patch[:3], raising=patch[3]) for patch in patches]
    for number, change in enumerate([*changes, *(edit.patch for edit in EDITS.values())]):
        with monkeypatch.context() as context:
            change(context)
            assert {type(inference.network) for inference in inferences} == {PlainNetwork}, number
        assert {type(inference.network) for inference in inferences} == {KernelNetwork}, number
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    assert type(inferences[0].network) is PlainNetwork
    handle.remove()
    assert type(inferences[0].network) is KernelNetwork
    with monkeypatch.context() as context:  # as transformers does when it makes a model
        context.setattr(nn.Module, "smart_apply", lambda self, function: self, raising=False)
        assert type(inferences[0].network) is KernelNetwork
    for mode in (Halved(), torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False)):
        with mode:
            assert type(inferences[0].network) is PlainNetwork, mode
    with torch.device("cpu"):  # which makes tensors, and changes no function
        assert type(inferences[0].network) is KernelNetwork


def test_a_generation_whose_state_has_two_rows_counts(tiny_model, monkeypatch):
    """Classifier-free guidance: the prompt, and the prompt without its first tokens."""
    prefill, decode = decoding.GenerationMixin.prefill, decoding.GenerationMixin.decode

    def guided(logits):
        return 2 * logits[:1] - logits[1:]

    def prefill_both(self, input_ids, images=None, attention_mask=None, prefix=None):
        both = torch.cat([input_ids, input_ids])
        mask = torch.ones_like(both)
        mask[1, :4] = 0
        logits, state = prefill(self, both, images, mask, prefix)
        return guided(logits), state

    def decode_both(self, ids, prefix):
        logits, state = decode(self, torch.cat([ids, ids]), prefix)
        return guided(logits), state

    model, prompts = tiny_model(), [[5, 6, 7, 8, 9, 10, 11], [9, 8, 7, 6, 5]]
    batch, answers = ContinuousBatch(model), []
    for _ in range(2):
        answers.append(run(batch, *(Request(ids, max_new_tokens=8) for ids in prompts)))
        assert answers[-1] == [model.generate(torch.tensor([ids]), max_new_tokens=8)[0].tolist() for ids in prompts]
        monkeypatch.setattr(decoding.GenerationMixin, "prefill", prefill_both)
        monkeypatch.setattr(decoding.GenerationMixin, "decode", decode_both)
    assert answers[0] != answers[1]


def test_an_edit_that_ends_an_answer_early_ends_the_request(tiny_model, monkeypatch):
    monkeypatch.setattr(decoding, "generate_tokens", lambda logits, *args: iter([logits.argmax(-1)]))
    for eos, finished in ((2, "stop"), (None, "error")):
        batch = ContinuousBatch(tiny_model(), eos_token_id=eos)
        batch.add(request := Request([5, 6, 7], max_new_tokens=8))
        outputs = [output for _ in range(3) for output in batch.step()]
        assert outputs[-1].finished == request.finished == finished and not batch.running


def test_freed_weights_are_noticed(tiny_model):
    inference = InferenceModel(model := tiny_model())
    model.decoder.blocks[0].mlp.up_proj.weight.untyped_storage().resize_(0)
    with pytest.raises(InputError, match=r"the memory of decoder.blocks.0.mlp.up_proj.weight was freed"):
        _ = inference.network


def test_the_digests_are_those_of_the_core():
    proof.CORE.difference()  # reads anew what another test has patched
    assert proof.CORE.digests == proof.WRITTEN_FOR, (
        "the core has changed, so nobody gets the kernels. Make them compute what it computes, or let it compute what "
        "it did; compare both by `python -m pytest tests/models/inference -m 'not slow'`, and put the output of "
        "`python -m models.inference.proof` into models/inference/proof.py"
    )


def as_module(name, path, text):
    path.write_text(text, encoding="utf-8")
    module = types.ModuleType(name)
    module.__file__ = str(path)
    with mock.patch.dict(sys.modules, {name: module}):  # where a dataclass looks
        exec(compile(text, path, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("file", proof.CORE._files, ids=lambda file: file.__name__)
def test_an_edit_of_any_function_is_a_difference_and_a_comment_is_none(file, tmp_path, monkeypatch):
    text = Path(file.__file__).read_text(encoding="utf-8")
    name = f"{file.__name__.replace('.', '/')}.py"
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    classes = [(node.name, node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = [(holder, x) for holder, body in [("", tree.body), *classes] for x in body
                 if isinstance(x, ast.FunctionDef)]  # fmt: skip
    for i, (holder, node) in enumerate(functions):
        start, at = node.lineno - 1, node.body[0].lineno - 1  # the first line of the body is mostly its docstring
        indent = " " * node.col_offset
        harmless = [*lines[:start], "\n", f"{indent}# a comment\n", *lines[start:]]
        if node.decorator_list:
            harmless = [*lines, "# a comment\n"]
        real = [*lines[:at], f"{indent}    edited = 1\n", *lines[at:]]
        if ast.unparse(node.body[0]) == "...":
            real = [*lines[:at], lines[at].replace("...", "pass"), *lines[at + 1 :]]
        assert not proof.Source(as_module(file.__name__, tmp_path / f"harmless{i}.py", "".join(harmless))).difference()
        edited = as_module(file.__name__, tmp_path / f"real{i}.py", "".join(real))
        assert proof.Source(edited).difference() == f"{name} is edited or patched", node.name
        place, new = (getattr(module, holder) if holder else module for module in (file, edited))
        with monkeypatch.context() as context:
            context.setattr(place, node.name, vars(new)[node.name])
            assert proof.CORE.difference() == f"{name} is edited or patched", (holder, node.name)
        assert not proof.CORE.difference()


def python(folder, *command):
    options = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(folder)}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *command], check=True, **options)
    return done.stdout, done.stderr


@pytest.fixture
def edited(tmp_path):
    for package in ("models", "nanovlm"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "generate.py", tmp_path)
    for edit in (EDITS["relu squared"], EDITS["a sliding window"]):
        path = tmp_path / f"models/{edit.file}.py"
        path.write_text(edit.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
    return tmp_path


def test_an_edit_of_the_files_counts_on_the_command_line_and_in_bfloat16_training(edited):
    program = """
import os
from nanovlm.cli.main import run_verb
from nanovlm.training import cpu_ops
run_verb("caption", [])
print(cpu_ops.ATTENTION.difference())
os.environ["NANOVLM_CPU_LEVEL"] = "none"
run_verb("caption", [])
"""
    out, err = python(edited, "-c", program)
    fast, difference, plain = out.splitlines()
    assert fast == plain != Captioner.from_pretrained().caption(SAMPLE)
    assert difference == "models/attention.py is edited or patched" and not cpu_ops.ATTENTION.difference()
    assert err.count("\n") == 1 and "modules are used instead of the faster kernels" in err


@pytest.mark.full
def test_an_edit_counts_without_the_sources(edited):
    plain, _ = python(edited, "-c", "from nanovlm.cli.main import run_verb; run_verb('caption', ['--device', 'cpu'])")
    compileall.compile_dir(edited, legacy=True, quiet=2)
    for path in edited.rglob("*.py"):
        path.unlink()
    out, err = python(edited, "generate.pyc")
    assert out == plain and "models/attention.py is without its source" in err
