"""Quantized weights: their error, their layout, and the plain layer that dequantizes them."""

import pytest
import torch
from torch import nn

from models.common.errors import InputError
from models.inference.inference_model import InferenceModel
from models.inference.quantization import QuantizedLinear, quantize_linears
from models.lora import LoRALinear
from support.generation import logits_of

ERRORS = {"int8": 0.01, "int4": 0.1}  # relative, of normally distributed weights
by_format = pytest.mark.parametrize("format", ERRORS)


@by_format
@pytest.mark.parametrize("size", [(64, 128), (40, 70), (3, 32), (300, 1)], ids=str)
def test_a_weight_is_close_to_its_quantized_form(format, size):
    torch.manual_seed(1)
    weight, x = torch.randn(size), torch.randn(2, 5, size[1])
    layer = QuantizedLinear(weight, None, format)
    stored = layer.dequantize(torch.float32)
    assert stored.shape == weight.shape and (stored - weight).norm() < ERRORS[format] * weight.norm()
    torch.testing.assert_close(layer(x), x @ stored.T)
    for value in (0.0, 1.5, -2.0):
        stored = QuantizedLinear(torch.full(size, value), None, format).dequantize(torch.float32)
        tolerance = 1e-6 if size[1] % 32 == 0 else ERRORS[format]  # int4: zeros fill up a group
        torch.testing.assert_close(stored, torch.full(size, value), rtol=tolerance, atol=0)


def test_sizes_are_a_byte_and_five_bits_a_weight():
    weight = torch.randn(128, 640)
    sizes = {name: sum(p.nbytes for p in QuantizedLinear(weight, None, name).parameters()) for name in ERRORS}
    assert sizes == {"int8": weight.numel() + 4 * 128, "int4": weight.numel() * 5 / 8}


def test_int4_is_fitted_closer_than_the_range_of_a_group():
    weight = torch.randn(64, 320, generator=torch.Generator().manual_seed(0))
    groups = weight.view(64, -1, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    plain = (((groups - low) / scale).round() * scale + low).view_as(weight)
    fitted = QuantizedLinear(weight, None, "int4").dequantize(torch.float32)
    assert (fitted - weight).square().mean() < 0.9 * (plain - weight).square().mean()


def test_adapters_are_merged_and_unknown_layers_refused():
    lora = LoRALinear(nn.Linear(32, 32), 2, 4)
    nn.init.normal_(lora.lora_B.weight)
    merged = lora.merged()
    quantize_linears(tree := nn.Sequential(lora), "int8")
    assert (tree[0].dequantize(torch.float32) - merged).norm() < 0.01 * merged.norm()
    with pytest.raises(InputError, match="0 is quantized already"):
        quantize_linears(tree, "int8")
    with pytest.raises(InputError, match="0 is a Other, which quantization does not know; merge it first"):
        quantize_linears(nn.Sequential(type("Other", (nn.Linear,), {})(2, 2)), "int8")


@by_format
def test_a_tied_head_is_stored_in_int8_and_the_embedding_stays(tiny_model, format):
    decoder = InferenceModel(tiny_model(), quantize=format).network.model.decoder
    formats = {name: layer.format for name, layer in decoder.named_modules() if isinstance(layer, QuantizedLinear)}
    assert formats.pop("head") == "int8" and set(formats.values()) == {format}
    assert len(formats) == 7 * len(decoder.blocks) and decoder.token_embedding.weight.dtype == torch.float32


@pytest.mark.parametrize("format", [None, *ERRORS])
def test_weights_with_transposed_strides_are_stored_as_others(tiny_model, format):
    model, transposed = tiny_model(), tiny_model()
    for layer in transposed.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    ids = torch.arange(4, 14)[None]
    answers = [logits_of(InferenceModel(m, quantize=format), ids=ids, images=None) for m in (model, transposed)]
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)


@by_format
def test_a_quantized_model_that_was_cast_is_refused(tiny_model, format):
    """The kernels would read beyond the weights, whose scales have half the bytes."""
    quantize_linears((model := tiny_model()).decoder, format)
    with pytest.raises(InputError, match=r"(scale|data|groups) of a quantized layer is torch.bfloat16 .*quantize it"):
        InferenceModel(model.bfloat16())
