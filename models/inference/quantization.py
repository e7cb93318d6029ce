"""Weights of 8 bits: a row of a matrix is integers from -127 to 127 times one scale, half the bytes of bfloat16."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 4  # rows of input; with more, making the weights floating-point numbers first costs less than it saves


class Int8Linear(nn.Linear):
    """An nn.Linear whose weight (out, in) is int8 and acts as scale[:, None] * weight."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        exact = linear.weight.detach().float()
        least = torch.finfo(linear.weight.dtype).tiny
        scale = (exact.abs().amax(1) / 127).clamp_min(least).to(linear.weight.dtype)  # rounded before it is used
        whole = (exact / scale[:, None].float()).round().clamp(-127, 127)
        self.weight = nn.Parameter(whole.to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features)."""
        whole = self.in_features % 32 == 0  # torch's kernel reads beyond the end of others in bfloat16
        if whole and x.device.type == "cpu" and x[..., 0].numel() <= FEW:
            y = torch._weight_int8pack_mm(x.reshape(-1, self.in_features), self.weight, self.scale)
            y = y.view(*x.shape[:-1], -1)
        else:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


def use_int8(decoder: nn.Module) -> nn.Module:
    """Make every nn.Linear inside decoder an Int8Linear; a head that shares its weight with the embedding leaves that
    as it is. In place. Raises ValueError for a decoder that has them already."""
    for module in list(decoder.modules()):
        for name, child in module.named_children():
            if isinstance(child, Int8Linear):
                raise ValueError(f"{name} is an Int8Linear already")
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return decoder
