"""Every level of the kernels computes what its naive twin and PyTorch compute, up to rounding in its precision."""

import pytest
import torch
from torch import nn

from models.inference.kernel_network import Packer, linear
from models.inference.kernels.load import load_library
from models.inference.quantization import QuantizedLinear
from support.kernels import LEVELS

HAVE_BF16_DOT = ("naive", "bf16", "amx-emulated", "amx")
SHAPES = [  # rows and depth of a weight, tokens
    (64, 128, 1), (64, 128, 5), (100, 70, 1), (100, 70, 40), (33, 130, 17), (97, 576, 33), (5, 3, 2), (4, 1, 3),
    (14, 66, 300),
]  # fmt: skip
# relative error of a matmul with random numbers: float32 sums; bfloat16 rounds activations; int8 and int4 round them
# to 127 steps of the largest of 64 values, or of a whole token
TOLERANCES = {"float32": 2e-6, "bfloat16": 4e-3, "int8": 1.5e-2, "int4": 1.5e-2}


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
    packer = Packer()
    return linear(load_library(level), packer.matrix(layer, layer.out_features, layer.in_features), x)


def error(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_is_the_matmul_of_its_weight(level, shape, kind):
    n_rows, depth, n = shape
    layer, weight = make_layer(kind, n_rows, depth)
    x = torch.randn(n, depth)
    exact = kind == "bfloat16" and (n == 1 or level not in HAVE_BF16_DOT)  # bfloat16 weights, float32 arithmetic
    wanted = x.double() @ weight.T + layer.bias.detach().double()
    assert error(product(level, layer, x), wanted) < TOLERANCES["float32" if exact else kind]


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("level", [level for level in LEVELS if level != "naive"])
def test_each_level_rounds_as_its_naive_twin(level, shape, kind):
    n_rows, depth, n = shape
    if n > 1 and kind in ("bfloat16", "int4") and level not in HAVE_BF16_DOT:
        pytest.skip("the level multiplies these in float32, its twin in bfloat16")
    layer, _ = make_layer(kind, n_rows, depth)
    x = torch.randn(n, depth)
    assert error(product(level, layer, x), product("naive", layer, x).double()) < 1e-5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_tokens_do_not_affect_each_other(level, kind):
    """A scale belongs to one token: what a token gives does not depend on the others of a batch."""
    layer, _ = make_layer(kind, 40, 128)
    x = torch.randn(40, 128)
    alone = product(level, layer, x)
    x[7:] *= 1000
    assert torch.equal(product(level, layer, x)[:7], alone[:7])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", [1, 40])
def test_extreme_values(level, n):
    layer, weight = make_layer("int8", 16, 64)
    for x in (torch.zeros(n, 64), torch.full((n, 64), 1e30), torch.full((n, 64), 1e-30)):
        y = product(level, layer, x) - layer.bias
        torch.testing.assert_close(y, (x.double() @ weight.T).float(), rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("n", [1, 40])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_token_with_a_nan_or_infinity_gives_neither_numbers_nor_harm_to_others(level, kind, n, wrong):
    layer, _ = make_layer(kind, 40, 128)
    x = torch.randn(n, 128)
    x[-1, 70] = wrong
    is_finite = product(level, layer, x).isfinite()
    assert is_finite[:-1].all() and not is_finite[-1].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", TOLERANCES)
def test_threads_give_the_same(level, kind):
    layer, _ = make_layer(kind, 200, 64)
    x, threads = torch.randn(70, 64), torch.get_num_threads()
    wanted = product(level, layer, x)
    try:
        torch.set_num_threads(3)
        assert torch.equal(product(level, layer, x), wanted)
    finally:
        torch.set_num_threads(threads)
