"""Matrix products by oneDNN: float32, where torch would ask MKL, which is slow on other makers' processors, and biases.

On AMD's, MKL takes nearly twice as long for large weights: compare `python -m eval.speedup --shape 222M --onednn` with
`--no-onednn`. bfloat16 goes to oneDNN by itself, but torch makes a bias one more pass over the result.
"""

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

CPUINFO = Path("/proc/cpuinfo")
LARGE = 300_000  # entries of a weight; below, calling oneDNN costs more than it saves


class OneDNNLinear(nn.Linear):
    """An nn.Linear with the same weights. What needs a gradient or a graph goes the usual way."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features)."""
        fits = x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and self.bias is not None)
        other = not fits or x.device.type != "cpu" or self.weight.dtype != x.dtype
        if other or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def use_onednn(model: nn.Module, on: bool = True) -> nn.Module:
    """Make every LARGE nn.Linear of model an OneDNNLinear, or with on=False back; names and weights stay. In place."""
    old, new = (nn.Linear, OneDNNLinear) if on else (OneDNNLinear, nn.Linear)
    for module in model.modules():
        if type(module) is old and module.weight.numel() >= LARGE:
            module.__class__ = new
    return model


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


def onednn_pays_off() -> bool:
    """Whether this processor is one on which torch's own choice, MKL, is slow, and oneDNN is there."""
    there = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return there and made_by("AuthenticAMD") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
