"""CPU kernels, and every private torch API that inference calls, each with a public fallback.

On AMD's processors torch computes float32 products by MKL, which takes nearly twice as long there as oneDNN for large
weights. bfloat16 products use oneDNN anyway, but torch adds a bias in a second pass over the result.

NANOVLM_NO_PRIVATE_KERNELS=1 in the environment forces the public fallbacks, for tests and for a torch that changed.
"""

import os
import platform
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import needs_grad_or_graph

CPUINFO = Path("/proc/cpuinfo")
X86 = ("x86_64", "amd64")
QUICK_COMPILE = {  # Inductor's options
    "cpp.vec_isa_ok": True,
    "aot_inductor.precompile_headers": False,
    "aot_inductor.enable_line_tables": False,
}
MIN_ONEDNN_ENTRIES = 300_000  # of a weight; calling oneDNN for a smaller one costs more than it saves


def private_kernels_allowed() -> bool:
    return os.environ.get("NANOVLM_NO_PRIVATE_KERNELS") != "1"


def has_onednn_linear() -> bool:
    """Whether this torch has oneDNN's linear with a fused activation, for a processor with fast kernels for it."""
    if not private_kernels_allowed() or platform.machine().lower() not in X86:  # elsewhere it may run reference code
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_int8_kernel() -> bool:
    """Whether this torch has a product with int8 weights for CPUs."""
    return private_kernels_allowed() and hasattr(torch, "_weight_int8pack_mm")


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear by oneDNN, for float32 and bfloat16 without gradients."""
    if not has_onednn_linear():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear by the faster library: oneDNN in bfloat16 and on AMD's processors, else torch's choice, MKL."""
    by_onednn = weight.dtype == torch.bfloat16 or onednn_pays_off()
    return onednn_linear(x, weight, bias) if by_onednn else F.linear(x, weight, bias)


def onednn_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear and GELU (tanh approximation) in one pass over the result.

    In bfloat16 GELU is computed by erf, in half the time on CPUs with AMX. It differs from the approximation by at most
    0.0005, a part of what bfloat16 rounds off of values where the difference is largest.
    """
    if not has_onednn_linear():
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    approximation = "none" if x.dtype == torch.bfloat16 else "tanh"
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], approximation)


def onednn_linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + F.linear(x, weight, bias) in one pass over the result."""
    if not has_onednn_linear():
        return residual + F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x (N, in) times the transpose of int8 weight (out, in) with scale (out,) per row: (N, out)."""
    if not has_int8_kernel():
        return F.linear(x, weight.to(x.dtype)) * scale
    return torch._weight_int8pack_mm(x.contiguous(), weight, scale)  # torch 2.6 refuses rows that are apart


def int8_linear_function(weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """`int8_linear` of one weight, with the choice of the kernel made once; for loops over small inputs."""
    if not has_int8_kernel():
        return partial(int8_linear, weight=weight, scale=scale)
    return partial(torch._weight_int8pack_mm, mat2=weight, scales=scale)


def has_int8_activations() -> bool:
    """Whether this torch and CPU multiply int8 activations by int8 weights; without VNNI the sums would overflow."""
    if not (private_kernels_allowed() and torch.backends.mkldnn.is_available()):
        return False
    available = all(hasattr(torch.ops.onednn, name) for name in ("qlinear_prepack", "qlinear_pointwise"))
    return available and "avx512_vnni" in cpu_info("flags").split()


def pack_int8(weight: Tensor) -> Tensor:
    """An int8 weight (out, in) in oneDNN's own layout, (in, out); `to_dense` gives it back."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


def onednn_int8_linear(
    codes: Tensor,
    scale: float,
    zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype = torch.float32,
    gelu: bool = False,
) -> Tensor:
    """scale * (codes - zero_point), codes (M, in) uint8, times a weight of `pack_int8` with weight_scale (out,).

    GELU is computed by erf, see `onednn_linear_gelu`. dtype is float32 or bfloat16. There is no fallback: callers
    check `has_int8_activations`.
    """
    post_op, algorithm = ("gelu", "none") if gelu else ("none", "")
    weight_zero_points = _zeros(len(weight_scale))
    return torch.ops.onednn.qlinear_pointwise(
        codes, scale, zero_point, weight, weight_scale, weight_zero_points, bias, 1.0, 0, dtype, post_op, [], algorithm
    )


@cache
def _zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int32)


def has_int4_kernel() -> bool:
    """Whether this torch has a product with group-wise int4 weights for CPUs."""
    names = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    return private_kernels_allowed() and all(hasattr(torch.ops.aten, name) for name in names)


def convert_int4(codes: Tensor) -> Tensor:
    """Codes (out, in) of 0 to 15 as bytes (out, in / 2) in the order that this processor's kernel reads."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)


def int4_linear(x: Tensor, weight: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """x (N, in) bfloat16 times the transpose of weight (out, in / 2) by `convert_int4`: (N, out).

    scale (in / group_size, out, 2) bfloat16 holds scales and zero points, the values of code 8. There is no fallback:
    callers check `has_int4_kernel`, and dequantize without it.
    """
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), weight, group_size, scale)


def int4_linear_function(weight: Tensor, scale: Tensor, group_size: int) -> Callable[[Tensor], Tensor]:
    """`int4_linear` of one weight, with the operator looked up once; for loops over small inputs."""
    kernel = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return partial(kernel, mat2=weight, qGroupSize=group_size, qScaleAndZeros=scale)


class OneDNNLinear(nn.Module):
    """A linear layer that shares its parameters with an nn.Linear and multiplies by oneDNN."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features)."""
        if x.dtype != self.weight.dtype or needs_grad_or_graph():
            return F.linear(x, self.weight, self.bias)
        return onednn_linear(x, self.weight, self.bias)


def replace_linears(module: nn.Module) -> nn.Module:
    """Replace, in place, every large nn.Linear inside module that oneDNN multiplies faster. Parameters are shared."""
    if has_onednn_linear():
        for parent in list(module.modules()):
            for name, child in parent.named_children():
                if type(child) is nn.Linear and _faster_by_onednn(child):
                    setattr(parent, name, OneDNNLinear(child))
    return module


def _faster_by_onednn(linear: nn.Linear) -> bool:
    weight = linear.weight
    suits = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and linear.bias is not None)
    return suits and weight.device.type == "cpu" and weight.numel() >= MIN_ONEDNN_ENTRIES


def cpu_info(field: str) -> str:
    """A field of /proc/cpuinfo, such as "model name" or "flags"; without it, what `platform` calls the processor."""
    for line in CPUINFO.read_text().splitlines() if CPUINFO.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return platform.processor() or platform.machine()


@cache
def made_by(maker: str) -> bool:
    """Whether this machine's processor names that maker, "AuthenticAMD" or "GenuineIntel"."""
    return maker in cpu_info("vendor_id")


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16 (AVX-512)."""
    if private_kernels_allowed() and hasattr(torch.cpu, "_is_avx512_bf16_supported"):
        return torch.cpu._is_avx512_bf16_supported()
    return "avx512_bf16" in cpu_info("flags").split()


def cpu_has_amx() -> bool:
    """Whether this CPU multiplies matrices in tiles (AMX)."""
    if private_kernels_allowed() and hasattr(torch.cpu, "_is_amx_tile_supported"):
        return torch.cpu._is_amx_tile_supported()
    return "amx_tile" in cpu_info("flags").split()


def onednn_pays_off() -> bool:
    """Whether torch would use MKL on a processor on which oneDNN is faster."""
    available = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return available and made_by("AuthenticAMD") and has_onednn_linear()


def check_compiler() -> None:
    """Raise RuntimeError if Inductor finds no C++ compiler."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
    except ImportError:  # moved in another version of torch, which then reports the failure itself
        return
    get_cpp_compiler()


def save_aoti_package(program: torch.export.ExportedProgram, path: Path) -> None:
    """Compile an exported program to a package, for the current number of threads.

    By default Inductor spends half of its time on test programs for each instruction set of the processor, and on
    precompiled headers for the next compilation. If compiling without the tests fails, they are run.
    """
    known = torch._inductor.list_options()
    quick = {name: value for name, value in QUICK_COMPILE.items() if name in known}
    try:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=quick)
    except Exception:  # of many kinds, by version: the C++ compiler may know fewer instruction sets than the processor
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def load_aoti_package(path: Path) -> Callable[[list[Tensor]], Tensor]:
    """The function in a package that returns one tensor; it takes its inputs as a list, which it empties.

    `torch._inductor.aoti_load_package` does the same, but imports the compiler, which takes two seconds.
    """
    if private_kernels_allowed():
        try:
            loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
            boxed_run = loader.boxed_run
        except (AttributeError, TypeError):  # another signature, in another version of torch
            pass
        else:
            return lambda inputs: boxed_run(inputs)[0]
    package: Any = torch._inductor.aoti_load_package(str(path))
    return lambda inputs: package(*inputs)
