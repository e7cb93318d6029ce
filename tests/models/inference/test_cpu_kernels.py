"""CPU kernels compute what torch's public functions compute, up to rounding, and can be switched off."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.inference import cpu_kernels
from models.inference.cpu_kernels import (
    OneDNNLinear,
    has_int8_kernel,
    has_onednn_linear,
    int8_linear,
    made_by,
    onednn_linear,
    onednn_linear_add,
    onednn_linear_gelu,
    onednn_pays_off,
    replace_linears,
)

needs_onednn = pytest.mark.skipif(not has_onednn_linear(), reason="this torch has no oneDNN linear")


@pytest.fixture(params=["private", "public"])
def kernels(request, monkeypatch):
    """Runs a test with the private kernels, if this torch has them, and with their public fallbacks."""
    if request.param == "public":
        monkeypatch.setenv("NANOVLM_NO_PRIVATE_KERNELS", "1")
        assert not has_onednn_linear() and not has_int8_kernel()
    return request.param


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 24), (3, 24), (24,), (2, 5, 24), (0, 24), (2, 3, 4, 24)])
def test_linear_kernels_match_public_functions(kernels, shape, bias, dtype):
    linear = nn.Linear(24, 40, bias=bias).to(dtype)
    tolerance = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for x in (torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 48, dtype=dtype)[..., ::2]):
        wanted = F.linear(x, linear.weight, linear.bias)
        torch.testing.assert_close(onednn_linear(x, linear.weight, linear.bias), wanted, **tolerance)
        torch.testing.assert_close(OneDNNLinear(linear)(x), wanted, **tolerance)
        residual = torch.randn_like(wanted)
        added = onednn_linear_add(x, linear.weight, linear.bias, residual)
        torch.testing.assert_close(added, wanted + residual, **tolerance)
        gelu = F.gelu(wanted, approximate="tanh")
        torch.testing.assert_close(onednn_linear_gelu(x, linear.weight, linear.bias), gelu, **tolerance)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 33])
def test_columns_times_weights_match_public_functions(kernels, dtype, n):
    weight = torch.randn(40, 24, dtype=dtype)
    tolerance = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    for x in (torch.randn(n, 24, dtype=dtype), torch.randn(24, n, dtype=dtype).t()):
        got = onednn_linear(weight, x, None)
        assert got.is_contiguous()
        torch.testing.assert_close(got.float(), weight.float() @ x.float().t(), **tolerance)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_kernel_matches_dequantized_weights(kernels, dtype):
    weight = torch.randint(-127, 128, (40, 32), dtype=torch.int8)
    scale, x = torch.rand(40).to(dtype) / 100, torch.randn(3, 32).to(dtype)
    wanted = F.linear(x.float(), weight.float() * scale.float()[:, None])
    torch.testing.assert_close(int8_linear(x, weight, scale).float(), wanted, rtol=0.02, atol=0.02)


@needs_onednn
def test_only_large_linears_are_replaced(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "MIN_ONEDNN_ENTRIES", 24 * 40)
    linears = [nn.Linear(24, 40), nn.Linear(24, 39)]
    model = replace_linears(nn.Sequential(*linears))
    assert [type(linear) for linear in model] == [OneDNNLinear, nn.Linear]
    assert model[0].weight is linears[0].weight and model[0].bias is linears[0].bias
    monkeypatch.setenv("NANOVLM_NO_PRIVATE_KERNELS", "1")
    assert type(replace_linears(nn.Sequential(nn.Linear(24, 40)))[0]) is nn.Linear


def test_onednn_products_are_for_x86_processors(monkeypatch):
    for machine, wanted in (("x86_64", True), ("AMD64", True), ("arm64", False), ("aarch64", False)):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert has_onednn_linear() == (wanted and hasattr(torch.ops.mkldnn, "_linear_pointwise"))


@needs_onednn
def test_gradients_flow_through_onednn_linears():
    linear = nn.Linear(24, 40)
    OneDNNLinear(linear)(torch.randn(3, 24)).sum().backward()
    assert linear.weight.grad.abs().sum() > 0


def test_processor_features_are_read_without_private_functions(monkeypatch, tmp_path):
    has_bfloat16, has_amx = cpu_kernels.cpu_has_bfloat16(), cpu_kernels.cpu_has_amx()
    monkeypatch.setenv("NANOVLM_NO_PRIVATE_KERNELS", "1")
    if cpu_kernels.CPUINFO.exists():
        assert (cpu_kernels.cpu_has_bfloat16(), cpu_kernels.cpu_has_amx()) == (has_bfloat16, has_amx)
    monkeypatch.setattr(cpu_kernels, "CPUINFO", tmp_path / "cpuinfo")
    for flags, wanted in (("sse avx512_bf16", (True, False)), ("amx_tile", (False, True)), ("", (False, False))):
        (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
        assert (cpu_kernels.cpu_has_bfloat16(), cpu_kernels.cpu_has_amx()) == wanted


def test_onednn_pays_off_on_amd_processors_only(monkeypatch, tmp_path):
    for maker, wanted in (("AuthenticAMD", True), ("GenuineIntel", False)):
        (tmp_path / "cpuinfo").write_text(f"vendor_id : {maker}\n")
        monkeypatch.setattr(cpu_kernels, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(cpu_kernels, "made_by", made_by.__wrapped__)
        monkeypatch.setattr("torch.backends.mkl.is_available", lambda: True)
        assert onednn_pays_off() == (wanted and has_onednn_linear())
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: False)
    assert not onednn_pays_off()


def test_a_package_is_compiled_with_all_of_inductors_tests_if_it_fails_without(monkeypatch, tmp_path):
    options = []

    def compile(program, package_path, inductor_configs=None):
        options.append(inductor_configs)
        if inductor_configs:
            raise RuntimeError("unknown flag -mavx10")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compile)
    cpu_kernels.save_aoti_package(None, tmp_path / "x.pt2")
    known = torch._inductor.list_options()
    assert options == [{name: value for name, value in cpu_kernels.QUICK_COMPILE.items() if name in known}, None]
    monkeypatch.setattr("torch._inductor.list_options", lambda: ["cpp.vec_isa_ok"])
    cpu_kernels.save_aoti_package(None, tmp_path / "x.pt2")
    assert options[2] == {"cpp.vec_isa_ok": True}, "an older torch refuses options that it does not know"
