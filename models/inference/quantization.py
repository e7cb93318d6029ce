"""Weight-only int8 quantization: each row of a matrix is integers from -127 to 127 times one scale."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.errors import InputError
from models.inference.cpu_kernels import has_int8_kernel, int8_linear, int8_linear_function
from models.lora import LoRALinear

MAX_KERNEL_ROWS = 4  # of the input; for more, converting the weights to floating point first is faster

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        y = F.linear(x, weight.to(x.dtype)) * scale
    return y if bias is None else y + bias


def int8_gemv(weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """`int8_matmul` for x (1, in), with the kernel chosen in advance: a decode step calls it four times per block."""
    if weight.size(1) % 32 == 0 and weight.device.type == "cpu" and scale.dtype in KERNEL_DTYPES:
        return int8_linear_function(weight, scale)
    return partial(int8_matmul, weight=weight, scale=scale)


def quantize_int8(module: nn.Module) -> nn.Module:
    """Replace, in place, every linear layer inside module by an Int8Linear; LoRA adapters are merged into it.

    A head that shares its weight with the embedding is quantized, the embedding is not. Raises InputError for a module
    that is quantized already, and for other subclasses of nn.Linear.
    """
    for name, child in list(module.named_children()):
        if isinstance(child, Int8Linear):
            raise InputError(f"{name} is an Int8Linear already; quantize the floating-point model instead")
        if isinstance(child, LoRALinear):
            setattr(module, name, Int8Linear(child.merged(), child.bias))
        elif type(child) is nn.Linear:
            setattr(module, name, Int8Linear(child.weight, child.bias))
        elif isinstance(child, nn.Linear):
            raise InputError(
                f"{name} is a {type(child).__name__}, which int8 quantization does not know; merge it first"
            )
        else:
            quantize_int8(child)
    return module
