"""Int8 products are what their codes and scales stand for, and rows do not affect each other."""

import copy
import pickle

import pytest
import torch
from torch import nn

from models.inference.cpu_kernels import has_int8_activations
from models.inference.int8_activations import Int8Matmul, quantize_rows, quantize_tensor
from models.inference.quantization import Int8Linear

needs_kernel = pytest.mark.skipif(not has_int8_activations(), reason="this CPU or torch has no int8 products")


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """What the codes of each row of x stand for, by division and rounding in float64."""
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x.double() / scale).round() * scale, 0.0)


def make_rows() -> torch.Tensor:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    x[1], x[2], x[3] = 0, 1000 * x[2], -x[3].abs()
    return x


def test_codes_stand_for_the_nearest_of_255_steps():
    x = make_rows()
    codes, scale = quantize_rows(x.clone())
    assert codes.dtype == torch.uint8 and codes.min() >= 1 and scale.shape == (6, 1)
    values = (codes.double() - 128) * scale
    torch.testing.assert_close(values, rounded_rows(x), rtol=1e-5, atol=1e-12)
    codes, one = quantize_tensor(x.clone())
    wanted = rounded_rows(x.view(1, -1)).view_as(x)
    torch.testing.assert_close((codes.double() - 128) * one, wanted, rtol=1e-5, atol=1e-12)
    assert quantize_tensor(torch.zeros(2, 3))[0].eq(128).all()


def test_a_lowest_value_saves_the_search_only():
    x = torch.nn.functional.gelu(make_rows())
    codes, scale = quantize_rows(x.clone(), -0.17)
    assert (scale >= 0.17 / 127).all()
    assert (((codes.double() - 128) * scale - x).abs() <= scale / 2 * 1.001).all()


@needs_kernel
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("width", [24, 96])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_codes_and_scales(rows, width, bias):
    torch.manual_seed(0)
    linears = [nn.Linear(width, n, bias=bias) for n in (40, 24)]
    layers = [Int8Linear(linear.weight, linear.bias) for linear in linears]
    weight = torch.cat([layer.weight.double() * layer.scale.double()[:, None] for layer in layers])
    offset = torch.cat([linear.bias.detach().double() for linear in linears]) if bias else 0
    matmul, x = Int8Matmul(*layers), torch.randn(rows, width)
    y = matmul.rows(*quantize_rows(x.clone()))
    torch.testing.assert_close(y.double(), rounded_rows(x) @ weight.T + offset, rtol=1e-4, atol=1e-4)

    wanted = rounded_rows(x.view(1, -1)).view_as(x) @ weight.T + offset
    codes, scale = quantize_tensor(x.clone())
    torch.testing.assert_close(matmul(codes, scale).double(), wanted, rtol=1e-4, atol=1e-4)
    gelu = matmul(codes, scale, torch.bfloat16, gelu=True)
    assert gelu.dtype == torch.bfloat16
    wanted = torch.nn.functional.gelu(wanted, approximate="tanh")
    torch.testing.assert_close(gelu.double(), wanted, rtol=0.01, atol=2e-3)


@needs_kernel
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_hold_the_same_weight(duplicate):
    matmul = Int8Matmul(Int8Linear(torch.randn(40, 24), torch.randn(40)))
    codes, scale = quantize_rows(torch.randn(7, 24))
    assert torch.equal(duplicate(matmul).rows(codes, scale), matmul.rows(codes, scale))
