"""Weight-only quantization of linear layers, to int8 here and to int4 in `models.inference.int4`.

In int8, each row of a matrix is integers from -127 to 127 times one scale.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.errors import InputError
from models.inference.cpu_kernels import has_int8_kernel, int8_linear, int8_linear_function
from models.inference.int4 import GROUP_SIZE, Int4Linear, pack_int4
from models.language_model import pack_linears
from models.lora import LoRALinear

logger = logging.getLogger(__name__)

MAX_KERNEL_ROWS = 4  # of the input; for more, converting the weights to floating point first is faster

KERNEL_DTYPES = (torch.bfloat16, torch.float16)  # in float32 the kernel takes twice as long as converting the weights
CONVERTED_ROWS = 4096  # of a weight at a time, which stay in the processor's cache


class Int8Linear(nn.Module):
    """A linear layer whose weight (out, in) is int8 and acts as scale[:, None] * weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        exact = weight.detach().float()
        smallest = torch.finfo(weight.dtype).tiny
        scale = (exact.abs().amax(1) / 127).clamp_min(smallest).to(weight.dtype)  # rounded before it is used
        rounded = (exact / scale[:, None].float()).round().clamp(-127, 127)
        self.weight = nn.Parameter(rounded.to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features)."""
        return int8_matmul(x, self.weight, self.scale, self.bias)


def int8_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) times the transpose of int8 weight (out, in) with scale (out,): (..., out)."""
    aligned = weight.size(1) % 32 == 0  # torch's kernel reads beyond the end of other rows in bfloat16
    fits = aligned and x.device.type == "cpu" and x.dtype in KERNEL_DTYPES and x[..., 0].numel() <= MAX_KERNEL_ROWS
    if fits and has_int8_kernel():
        y = int8_linear(x.reshape(-1, x.size(-1)), weight, scale).view(*x.shape[:-1], -1)
    else:
        parts = [F.linear(x, part.to(x.dtype)) for part in weight.split(CONVERTED_ROWS)]
        y = (torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]) * scale
    return y if bias is None else y + bias


def int8_gemv(weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """`int8_matmul` for x (1, in), with the kernel chosen in advance: a decode step calls it four times per block."""
    if weight.size(1) % 32 == 0 and weight.device.type == "cpu" and scale.dtype in KERNEL_DTYPES:
        return int8_linear_function(weight, scale)
    return partial(int8_matmul, weight=weight, scale=scale)


QuantizedLinear = Int8Linear | Int4Linear


def quantize_int8(module: nn.Module) -> nn.Module:
    """Replace, in place, every linear layer inside module by an Int8Linear; LoRA adapters are merged into it.

    A head that shares its weight with the embedding is quantized, the embedding is not. Raises InputError for a module
    that is quantized already, and for other subclasses of nn.Linear.
    """
    return _replace_linears(module, Int8Linear)


def quantize_int4(module: nn.Module) -> nn.Module:
    """`quantize_int8` with Int4Linears, but a layer becomes an Int8Linear if 32 does not divide its input width."""
    return _replace_linears(module, _int4_linear)


QUANTIZERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "int8": quantize_int8,
    "int8-weights": quantize_int8,
    "int4": quantize_int4,
}


def quantizer(name: str) -> Callable[[nn.Module], nn.Module]:
    """The function of that name in QUANTIZERS. Raises InputError for others."""
    if name not in QUANTIZERS:
        raise InputError(f"quantize={name!r} is not supported; use {', '.join(map(repr, QUANTIZERS))} or None")
    return QUANTIZERS[name]


def pack_quantized(linears: Sequence[nn.Module]) -> None:
    """`models.language_model.pack_linears` for layers of one kind, quantized or not."""
    int4 = [linear for linear in linears if isinstance(linear, Int4Linear)]
    pack_int4(int4) if int4 else pack_linears(linears)


def _int4_linear(weight: Tensor, bias: Tensor | None) -> QuantizedLinear:
    if weight.size(1) % GROUP_SIZE:
        logger.info("a weight of %d input features, not a multiple of %d, becomes int8", weight.size(1), GROUP_SIZE)
        return Int8Linear(weight, bias)
    return Int4Linear(weight, bias)


def _replace_linears(module: nn.Module, make: Callable[[Tensor, Tensor | None], QuantizedLinear]) -> nn.Module:
    for name, child in list(module.named_children()):
        kind = type(child).__name__
        if isinstance(child, QuantizedLinear):
            raise InputError(f"{name} is an {kind} already; quantize the floating-point model instead")
        if isinstance(child, LoRALinear):
            setattr(module, name, make(child.merged(), child.bias))
        elif type(child) is nn.Linear:
            setattr(module, name, make(child.weight, child.bias))
        elif isinstance(child, nn.Linear):
            raise InputError(f"{name} is a {kind}, which quantization does not know; merge it first")
        else:
            _replace_linears(child, make)
    return module
