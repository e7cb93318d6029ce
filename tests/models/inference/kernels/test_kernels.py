"""Every level of the kernels computes what its naive twin and PyTorch compute, up to rounding in its precision."""

import pytest
import torch
from torch import nn

from models.inference.kernel_network import Packer, linear
from models.inference.kernels.load import load_library
from models.inference.quantization import QuantizedLinear
from support.kernels import LEVELS

HAVE_BF16_DOT = ("naive", "bf16", "amx-emulated", "amx", "neon-i8mm")
SHAPES = [  # rows and depth of a weight, tokens
    (64, 128, 1), (64, 128, 5), (100, 70, 1), (100, 70, 40), (33, 130, 17), (97, 576, 33), (5, 3, 2), (4, 1, 3),
    (14, 66, 300),
]  # fmt: skip
# relative error of a matmul with random numbers: float32 sums; bfloat16 rounds activations; int8 and int4 round them
# to 127 steps of the largest of 64 values, or of a whole token
TOLERANCES = {"float32": 2e-6, "bfloat16": 4e-3, "int8": 1.5e-2, "int4": 1.5e-2}
by_level = pytest.mark.parametrize("level", LEVELS)
by_kind = pytest.mark.parametrize("kind", TOLERANCES)


def make_layer(kind: str, n_rows: int, depth: int) -> tuple[nn.Module, torch.Tensor]:
    """A layer of a kind, and the weight (n_rows, depth) float64 that it acts as."""
    torch.manual_seed(n_rows * depth)
    layer: nn.Module = nn.Linear(depth, n_rows)
    if kind in ("int8", "int4"):
        layer = QuantizedLinear(layer.weight, layer.bias, kind)
        return layer, layer.dequantize(torch.float64)
    layer = layer.to(getattr(torch, kind))
    return layer, layer.weight.detach().double()


def product(level: str, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    matrix = (packer := Packer()).matrix(layer, layer.out_features, layer.in_features)
    assert packer.kept
    return linear(load_library(level), matrix, x)


def error(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


@by_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_level
def test_a_layer_is_the_matmul_of_its_weight_and_rounds_as_its_naive_twin(level, shape, kind):
    n_rows, depth, n = shape
    layer, weight = make_layer(kind, n_rows, depth)
    x = torch.randn(n, depth)
    y, wanted = product(level, layer, x), x.double() @ weight.T + layer.bias.detach().double()
    has_bf16 = level in HAVE_BF16_DOT
    exact = kind == "bfloat16" and not has_bf16  # bfloat16 weights, float32 arithmetic
    assert error(y, wanted) < TOLERANCES["float32" if exact else kind]
    in_float32 = not has_bf16 and (kind == "bfloat16" or (kind == "int4" and n > 1))  # unlike their twin
    if not in_float32:
        assert error(y, product("naive", layer, x).double()) < 1e-5


@by_level
@by_kind
@pytest.mark.parametrize("n", [1, 40])
@torch.no_grad()
def test_extreme_values(level, kind, n):
    layer, weight = make_layer(kind, 16, 64)
    for x in (torch.zeros(n, 64), torch.full((n, 64), 1e30), torch.full((n, 64), 1e-30)):
        y = product(level, layer, x) - layer.bias.float()
        torch.testing.assert_close(y, (x.double() @ weight.T).float(), rtol=0.02, atol=1e-5)
    for wrong in (float("nan"), float("inf")):  # gives no number, and no harm to other tokens
        x = torch.randn(n, 64)
        x[-1, 50] = wrong
        is_finite = product(level, layer, x).isfinite()
        assert is_finite[:-1].all() and not is_finite[-1].any()
    if kind == "int8":
        layer, weight = make_layer(kind, 32, 576)
        x = torch.randn(n, 576)
        x[:, 50] = 100  # is 127 steps: without mixing, a token's other values would have two or three
        assert error(product(level, layer, x), x.double() @ weight.T + layer.bias.double()) < TOLERANCES[kind]


@by_level
@by_kind
def test_neither_other_tokens_nor_threads_change_a_token(level, kind):
    layer, _ = make_layer(kind, 200, 128)
    x, threads = torch.randn(70, 128), torch.get_num_threads()
    alone = product(level, layer, x)
    x[7:] *= 1000
    try:
        torch.set_num_threads(3)
        assert torch.equal(product(level, layer, x)[:7], alone[:7])
    finally:
        torch.set_num_threads(threads)


@by_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(5, 3), (64, 130), (40, 576)], ids=str)
def test_a_weight_is_quantized_as_without_kernels(monkeypatch, level, dtype, size):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[:1] = 0
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", "none")
    wanted = QuantizedLinear(weight)
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", level)
    for layer in (QuantizedLinear(weight), QuantizedLinear(weight.t().contiguous().t())):
        torch.testing.assert_close(layer.scale, wanted.scale, rtol=1e-6, atol=0)
        steps = (layer.data.int() - wanted.data.int()).abs()
        assert steps.max() <= 1 and steps.sum() <= 0.001 * steps.numel()  # sums may be rounded in another order
