"""LoRA over a quantized base: its gradients are those of the dequantized weights; the original ones are merged."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoint import load_config
from models.lora import LoRALinear, adapt, adapters, merge, read_adapters
from models.vision_language_model import VisionLanguageModel, load_model
from nanovlm.errors import CheckpointError
from nanovlm.training.config import BASE_FORMATS, TrainConfig
from nanovlm.training.quantized_base import QuantizedBaseLinear, QuantizedLoRALinear, count_parameters, quantize_base
from support.smolvlm import write_folder
from support.training import train

# relative error of a random weight in each format, with some room
ERRORS = {"bfloat16": 0.004, "int8": 0.02, "int4": 0.12}


@pytest.fixture
def saved(tiny_model, tmp_path):
    """A tiny model, read from its folder, and the folder."""

    def make(**changes) -> tuple[VisionLanguageModel, Path]:
        model = tiny_model(**changes)
        model.save_pretrained(folder := tmp_path / "base", tokenizer="{}")
        return load_model(folder, load_config(folder), model.image_token_id), folder

    return make


def dequantized(model: VisionLanguageModel, plain: VisionLanguageModel) -> VisionLanguageModel:
    """plain with the weights that the quantized model acts as."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, QuantizedBaseLinear):
                plain.get_parameter(f"{name}.weight").copy_(module.dequantize(torch.float32))
    return plain


@pytest.mark.parametrize("format", BASE_FORMATS)
@pytest.mark.parametrize("features", [(64, 96), (32, 40), (24, 70)], ids=str)
def test_a_layer_computes_with_its_dequantized_weight_forward_and_backward(format, features):
    torch.manual_seed(0)
    linear = nn.Linear(*features).requires_grad_(False)
    layer = QuantizedBaseLinear(linear, format, lambda: linear.weight)
    weight = layer.dequantize(torch.float32)
    assert weight.shape == linear.weight.shape
    assert (weight - linear.weight).norm() <= ERRORS[format] * linear.weight.norm()
    x, gradient = torch.randn(2, 5, features[0], requires_grad=True), torch.randn(2, 5, features[1])
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        y = layer(x)
    assert not kept  # as a dequantized weight would be, until the backward pass
    assert torch.allclose(y, F.linear(x, weight, linear.bias), atol=1e-5)
    y.backward(gradient)
    assert torch.allclose(x.grad, gradient @ weight, atol=1e-5)
    assert not any(p.requires_grad for p in layer.parameters()) and layer.weight.grad is None


def test_autocast_computes_in_its_dtype():
    layer = QuantizedBaseLinear(nn.Linear(32, 16).requires_grad_(False), "int8", torch.Tensor)
    x = torch.randn(3, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32


@pytest.mark.parametrize("format", BASE_FORMATS)
@pytest.mark.parametrize("embeddings", [False, True], ids=["adapters", "and words"])
def test_adapters_get_the_gradients_of_a_model_with_the_dequantized_weights(saved, make_batch, format, embeddings):
    model, folder = saved()
    plain = copy.deepcopy(model)
    quantize_base(model, format, folder)
    plain = dequantized(model, plain)
    losses = []
    for one in (model, plain):
        torch.manual_seed(1)
        adapt(one, rank=2, alpha=4.0, embeddings=embeddings)
        with torch.no_grad():
            for module in adapters(one).values():
                module.lora_B.weight.normal_(std=0.1)
        losses.append(one.train()(**make_batch(0))[1])
        losses[-1].backward()
    assert torch.allclose(losses[0], losses[1], atol=1e-5)
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found and all(gradient.dtype == torch.float32 for gradient in found.values())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("format", BASE_FORMATS)
def test_frozen_parts_are_quantized_too(saved, format):
    model, folder = saved()
    numel = count_parameters(model)
    quantize_base(model, format, folder)
    adapt(model, 2, 4.0, parts=["decoder"])
    assert count_parameters(model) == numel + sum(p.numel() for n, p in model.named_parameters() if ".lora_" in n)
    kinds = {type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert kinds == {QuantizedBaseLinear, QuantizedLoRALinear, nn.Linear}  # the last are head and adapters
    plain = [n for n, m in model.named_modules() if type(m) is nn.Linear and ".lora_" not in n]
    assert plain == ["decoder.head"]


@pytest.fixture(params=["nanovlm", pytest.param("smolvlm", marks=pytest.mark.full)])
def base(request, saved, make_batch, tmp_path):
    """A base model's folder, its image token, and a function that makes its batches."""
    if request.param == "nanovlm":
        model, folder = saved()
        return folder, model.image_token_id, make_batch
    write_folder(folder := tmp_path / "base", dtype=torch.bfloat16)
    token = load_config(folder).format.find_image_token_id(folder, load_config(folder))

    def batch(i):
        made = make_batch(i)
        return made | {"input_ids": made["input_ids"].where(made["input_ids"] != 3, token)}

    return folder, token, batch


@pytest.mark.parametrize(
    "format", ["int4", *(pytest.param(name, marks=pytest.mark.full) for name in ("bfloat16", "int8"))]
)
def test_a_run_merges_its_adapters_into_the_original_weights_and_is_resumed(base, tmp_path, format):
    folder, token, batch = base
    cfg = TrainConfig(
        lora_rank=2, train_embeddings=False, num_workers=0, save_every=2, warmup_steps=0, decay=0, lr=0.01
    )

    def run(steps: int, out: str) -> VisionLanguageModel:
        start = quantize_base(load_model(folder, load_config(folder), token), format, folder)
        return train(start, "{}", batch, replace(cfg, max_steps=steps, dtype="float32"), tmp_path / out)

    merged = run(4, "whole").state_dict()
    written = load_model(tmp_path / "whole", load_config(tmp_path / "whole"), token).state_dict()
    adapted = load_model(folder, load_config(folder), token)
    read_adapters(tmp_path / "whole", adapted)  # onto the full-precision base
    assert all(type(module) is LoRALinear for module in adapters(adapted).values())
    expected = merge(adapted).state_dict()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
    name = "decoder.blocks.0.mlp.up_proj.weight"
    assert not torch.equal(written[name], load_model(folder, load_config(folder), token).get_parameter(name))
    run(2, "stopped")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in run(4, "stopped").state_dict().items())


def test_a_base_model_that_vanished_is_one_line(saved):
    model, folder = saved()
    quantize_base(model, "int4", folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="base") as caught:
        merge(model)
    assert "\n" not in str(caught.value)
