"""Quantized weights: their error, their layout, and the plain layer that dequantizes them."""

import copy

import pytest
import torch
from torch import nn

from models.errors import InputError
from models.inference.inference_model import InferenceModel
from models.inference.quantization import QuantizedLinear, quantize_linears
from models.lora import LoRALinear

ERRORS = {"int8": 0.01, "int4": 0.1}  # relative, of normally distributed weights


@pytest.mark.parametrize("format", ERRORS)
@pytest.mark.parametrize("size", [(64, 128), (40, 70), (3, 32), (300, 1)], ids=str)
def test_a_weight_is_close_to_its_quantized_form(format, size):
    torch.manual_seed(1)
    weight = torch.randn(size)
    layer = QuantizedLinear(weight, None, format)
    stored = layer.dequantize(torch.float32)
    assert stored.shape == weight.shape
    assert (stored - weight).norm() < ERRORS[format] * weight.norm()
    x = torch.randn(2, 5, size[1])
    torch.testing.assert_close(layer(x), x @ stored.T)


@pytest.mark.parametrize("format", ERRORS)
def test_zeros_and_constants_are_exact(format):
    for value in (0.0, 1.5, -2.0):
        stored = QuantizedLinear(torch.full((4, 64), value), None, format).dequantize(torch.float32)
        torch.testing.assert_close(stored, torch.full((4, 64), value), rtol=1e-6, atol=0)


def test_sizes_are_a_byte_and_five_bits_a_weight():
    weight = torch.randn(128, 640)
    sizes = {name: sum(p.nbytes for p in QuantizedLinear(weight, None, name).parameters()) for name in ERRORS}
    assert sizes == {"int8": weight.numel() + 4 * 128, "int4": weight.numel() * 5 / 8}


def test_adapters_are_merged_and_unknown_layers_refused():
    class Other(nn.Linear):
        pass

    lora = LoRALinear(nn.Linear(32, 32), 2, 4)
    nn.init.normal_(lora.lora_B.weight)
    quantize_linears(tree := nn.Sequential(copy.deepcopy(lora)), "int8")
    assert (tree[0].dequantize(torch.float32) - lora.merged()).norm() < 0.01 * lora.merged().norm()
    with pytest.raises(InputError, match="0 is quantized already"):
        quantize_linears(tree, "int8")
    with pytest.raises(InputError, match="0 is a Other, which quantization does not know; merge it first"):
        quantize_linears(nn.Sequential(Other(2, 2)), "int8")


def test_only_the_embedding_of_a_tied_head_stays(tiny_model):
    inference = InferenceModel(tiny_model(), quantize="int8")
    decoder = inference.network.model.decoder
    assert isinstance(decoder.head, QuantizedLinear) and decoder.token_embedding.weight.dtype == torch.float32
