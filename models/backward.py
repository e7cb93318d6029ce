"""RMSNorm and rotary embeddings with their backward passes written out, for training on the CPU.

There, these operations are bound by memory bandwidth. The formulas read and write about half as many tensors as the
operations that autograd records, and keep fewer for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def is_faster_written_out(x: Tensor) -> bool:
    """Whether x is on a CPU and gets a gradient; a compiler fuses the plain operations by itself."""
    return x.requires_grad and x.device.type == "cpu" and not torch.compiler.is_compiling()


class RMSNormFunction(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension of x (..., C) float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        normalized = x * inverse
        ctx.save_for_backward(normalized, inverse, weight)
        return normalized * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        normalized, inverse, weight = ctx.saved_tensors
        product = (grad * normalized).flatten(0, -2)
        grad_weight = product.sum(0) if ctx.needs_input_grad[1] else None
        mean = (product @ weight).view(inverse.shape).div_(weight.numel())
        return (grad * weight).addcmul_(normalized, mean, value=-1).mul_(inverse), grad_weight, None


class RotationFunction(torch.autograd.Function):
    """`models.language_model.apply_rope`; the gradient is rotated by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.size(-1) // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos[..., :half], sin[..., :half]  # the other half is the same
    y = torch.empty_like(x)
    y[..., :half] = (first * cos).addcmul_(second, sin, value=-sign)
    y[..., half:] = (second * cos).addcmul_(first, sin, value=sign)
    return y
