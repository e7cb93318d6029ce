"""int4 weights act as the numbers that they stand for, with torch's kernel and without it, and fit well."""

import pytest
import torch
from torch import nn

from models.inference.cpu_kernels import convert_int4, has_int4_kernel
from models.inference.fused_decode_step import concat_linears
from models.inference.int4 import (
    GROUP_SIZE,
    MAX_KERNEL_ROWS,
    Int4Layout,
    Int4Linear,
    int4_gemv,
    kernel_layout,
    pack_int4,
    quantize_groups,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["private", "public"], autouse=True)
def kernels(request, monkeypatch):
    """Every test runs with torch's kernel, if it has one, and with the public fallback."""
    monkeypatch.setenv("NANOVLM_NO_PRIVATE_KERNELS", "01"[request.param == "public"])
    assert request.param == "private" or kernel_layout() is None
    return request.param


def reference(weight: torch.Tensor) -> torch.Tensor:
    """What the quantized weight (out, in) stands for, number by number."""
    codes, scale = quantize_groups(weight)
    rows = []
    for row, lines in zip(codes.float(), scale.float().transpose(0, 1)):
        rows.append([(code - 8) * lines[i // GROUP_SIZE, 0] + lines[i // GROUP_SIZE, 1] for i, code in enumerate(row)])
    return torch.tensor(rows)


def make_weight(n_out: int, n_in: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    weight = torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(n_out))
    weight[3] = 0
    weight[4] *= 1000
    weight[5] = -2.5
    weight[6] += 3
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 2, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1])
@pytest.mark.parametrize("n_out", [64, 24, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_acts_as_its_dequantized_weight(dtype, rows, n_out, bias):
    weight, offset = make_weight(n_out, 96, dtype), torch.randn(n_out).to(dtype) if bias else None
    linear, wanted_weight = Int4Linear(weight, offset), reference(weight)
    torch.testing.assert_close(linear.dequantize(torch.float32).t(), wanted_weight)
    x = torch.randn(2, rows // 2, 96).to(dtype) if rows % 2 == 0 else torch.randn(rows, 96).to(dtype)
    with torch.inference_mode():
        got = linear(x)
        wanted = nn.functional.linear(x.float(), wanted_weight, offset.float() if bias else None)
    assert got.dtype == dtype and got.shape == wanted.shape
    size = wanted_weight.norm(dim=-1)  # of an output
    assert ((got.float() - wanted).abs() <= 0.03 * size + 0.01).all()


def test_torchs_kernel_reads_a_known_layout(kernels):
    if kernels == "public" or not has_int4_kernel():
        return
    layout, codes = kernel_layout(), torch.randint(16, (128, 96), dtype=torch.uint8)
    assert layout is not None, "a layout of another processor: add it to _kernel_layout"
    assert torch.equal(layout.pack(codes), convert_int4(codes))


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("neighbors", [True, False])
def test_codes_survive_every_layout(rows, neighbors, monkeypatch):
    layout, codes = Int4Layout(rows, neighbors), torch.randint(16, (128, 96), dtype=torch.uint8)
    packed = layout.pack(codes)
    assert packed.shape == (128, 48) and torch.equal(layout.unpack(packed), codes.t())
    linear = Int4Linear(weight := make_weight(64, 64))
    linear.weight.data, linear.layout = layout.pack(linear.layout.unpack(linear.weight).t().contiguous()), layout
    x = torch.randn(1, 64)
    torch.testing.assert_close(linear(x), x @ reference(weight).t(), rtol=0.02, atol=8)


def test_weights_fit_better_than_by_rounding_within_each_groups_range():
    weight = torch.randn(64, 256)
    groups = weight.view(64, -1, GROUP_SIZE)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    by_range = ((groups - low) / scale).round() * scale + low
    error = (reference(weight) - weight).norm()
    assert 0.05 * weight.norm() < error < 0.95 * (by_range - groups).norm()
    grid = (torch.randint(16, (64, 64)) - 8) * 0.25 + 0.5
    grid[:, ::32], grid[:, 1::32] = -1.5, 2.25
    assert torch.equal(reference(grid), grid), "what 4 bits can hold stays exact"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 128, 64), (64, 64), (128,), (130,), (24,)])
def test_adjacent_layers_are_one_product(dtype, sizes, kernels):
    linears = [Int4Linear(make_weight(n, 64, dtype)) for n in sizes]
    before = [linear.dequantize(torch.float32) for linear in linears]
    pack_int4(linears)
    assert all(torch.equal(linear.dequantize(torch.float32), weight) for linear, weight in zip(linears, before))
    matmul = int4_gemv(linears)
    assert (matmul is None) == (kernel_layout() is None)
    x = torch.randn(1, 64).to(dtype)
    wanted = torch.cat([linear(x) for linear in linears], dim=-1)
    assert torch.equal(concat_linears(*linears)(x), wanted) and wanted.dtype == dtype
    assert matmul is None or torch.equal(matmul(x), wanted)


def test_layers_apart_or_padded_are_several_products():
    for sizes in ((64, 64), (24, 64), (64, 24)):
        linears = [Int4Linear(make_weight(n, 64)) for n in sizes]
        if 24 in sizes:
            pack_int4(linears)
        assert int4_gemv(linears) is None
        x = torch.randn(1, 64)
        assert torch.equal(concat_linears(*linears)(x), torch.cat([linear(x) for linear in linears], dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_apart_in_memory_give_the_same(dtype):
    linear, x = Int4Linear(torch.randn(64, 96).to(dtype)), torch.randn(3, 5, 96).to(dtype)[:, -1]
    assert not x.is_contiguous() and torch.equal(linear(x), linear(x.contiguous()))
