"""Linear layers with weights in 8 or 4 bits, in the layout that the kernels read."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.errors import InputError

FORMATS = ("int8", "int4")
GROUP_SIZE = 32  # weights of a row that share a scale and a minimum in int4
ROW_MULTIPLE = 64  # stored rows are padded to it
FIT_STEPS = 3  # reduce the squared error by 7%; more steps add less than 1%
FIT_ROWS = 256  # of a weight at a time, which fit the cache


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight. Without kernels, each call dequantizes it: that saves memory, not time.

    int8: `data` (out, stride) uint8 holds 128 + value, and a row's values times its entry of `scale` (out,) float32 are
    the weight. int4: `data` (out, stride / 2) uint8 holds 64 values of a row in 32 bytes, the first 32 in the lower
    halves; `groups` (out, stride / 32) int32 holds a scale and a minimum in bfloat16 for 32 values, the scale in the
    lower half. stride is in_features rounded up to a multiple of 64.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, format: str = "int8"):
        super().__init__()
        (self.out_features, self.in_features), self.format = weight.shape, format
        data, scale, groups = quantize_weight(weight.detach(), format)
        self.stride = data.size(1) * (1 if format == "int8" else 2)
        self.data = nn.Parameter(data, requires_grad=False)
        self.scale, self.groups = (None if x is None else nn.Parameter(x, requires_grad=False) for x in (scale, groups))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def check(self) -> None:
        """Raise InputError unless the quantized weight still has its dtypes, which `.bfloat16()` would change."""
        n_rows = self.out_features
        expected = {"data": torch.uint8, "scale": torch.float32, "groups": torch.int32}
        for name, dtype in expected.items():
            x = getattr(self, name)
            if x is not None and (x.dtype != dtype or len(x) != n_rows or not x.is_contiguous()):
                raise InputError(
                    f"{name} of a quantized layer is {x.dtype} {tuple(x.shape)}, not {dtype}; "
                    "convert the floating-point model, and quantize it then"
                )

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features)."""
        return F.linear(x, self.dequantize(x.dtype), self.bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight (out, in) that the layer acts as."""
        return dequantize_weight(self.data, self.scale, self.groups, self.in_features).to(dtype)


def quantize_weight(weight: Tensor, format: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`data`, `scale` and `groups` of `QuantizedLinear` for a weight (out, in)."""
    stride = -(-weight.size(1) // ROW_MULTIPLE) * ROW_MULTIPLE
    if format == "int8":
        return *_quantize_int8(weight.float().contiguous(), stride), None
    parts = [_quantize_int4(rows.float().contiguous(), stride) for rows in weight.split(FIT_ROWS)]
    data, groups = (torch.cat(part) for part in zip(*parts))
    return data, None, groups


def dequantize_weight(data: Tensor, scale: Tensor | None, groups: Tensor | None, in_features: int) -> Tensor:
    """The weight (out, in_features) float32 that `quantize_weight` stored."""
    if scale is not None:
        return (data[:, :in_features].float() - 128) * scale[:, None]
    assert groups is not None
    n, blocks = len(data), data.view(len(data), -1, 1, GROUP_SIZE)
    values = torch.cat([blocks & 15, blocks >> 4], dim=2).view(n, -1, GROUP_SIZE)
    step, minimum = groups.view(torch.bfloat16).view(n, -1, 2, 1).float().unbind(2)
    return (values * step + minimum).flatten(1)[:, :in_features]


def quantize_linears(module: nn.Module, format: str) -> None:
    """Replace, in place, every linear layer inside module by a QuantizedLinear; LoRA adapters are merged into it.

    With int4 a layer named `head` is stored in int8: four bits there cost more than in all other layers together. A
    head that shares its weight with the embedding is quantized, the embedding is not. Raises InputError for a module
    that is quantized already, and for other subclasses of nn.Linear.
    """
    from models.lora import LoRALinear  # here, as a caption without quantization needs no adapters

    for name, child in list(module.named_children()):
        kind = type(child).__name__
        stored = "int8" if name == "head" else format
        if isinstance(child, QuantizedLinear):
            raise InputError(f"{name} is quantized already; quantize the floating-point model instead")
        if isinstance(child, LoRALinear):
            setattr(module, name, QuantizedLinear(child.merged(), child.bias, stored))
        elif type(child) is nn.Linear:
            setattr(module, name, QuantizedLinear(child.weight, child.bias, stored))
        elif isinstance(child, nn.Linear):
            raise InputError(f"{name} is a {kind}, which quantization does not know; merge it first")
        else:
            quantize_linears(child, format)


def check_format(format: str | None) -> None:
    """Raise InputError unless format is one of FORMATS or None."""
    if format is not None and format not in FORMATS:
        raise InputError(f"quantize={format!r} is not supported; use {', '.join(map(repr, FORMATS))} or None")


def _quantize_int8(weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    scale = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    values = (weight / scale[:, None]).round_().clamp_(-127, 127).add_(128)
    return F.pad(values, (0, stride - weight.size(1)), value=128).to(torch.uint8), scale


def _quantize_int4(weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Data and groups of a weight (n, in) float32.

    From each group's range on, values and the line through them are fitted in turns, as in Lloyd's algorithm.
    """
    groups = F.pad(weight, (0, stride - weight.size(1))).view(len(weight), -1, GROUP_SIZE)
    smallest, (low, high) = torch.finfo(torch.bfloat16).tiny, groups.aminmax(dim=-1, keepdim=True)
    scale, minimum = _rounded(((high - low) / 15).clamp_min(smallest)), _rounded(low)
    mean = groups.mean(-1, keepdim=True)
    for _ in range(FIT_STEPS):
        values = ((groups - minimum) / scale).round_().clamp_(0, 15)
        center = values.mean(-1, keepdim=True)
        values = values - center
        variance = values.square().sum(-1, keepdim=True)
        slope = (values * groups).sum(-1, keepdim=True) / variance
        scale = _rounded(torch.where(variance > 0, slope, scale).clamp_min(smallest))
        minimum = _rounded(mean - scale * center)
    values = ((groups - minimum) / scale).round_().clamp_(0, 15).to(torch.uint8).view(len(weight), -1, 2, GROUP_SIZE)
    pairs = torch.cat([scale, minimum], dim=-1).bfloat16().view(torch.int32).squeeze(-1)
    return (values[:, :, 0] | values[:, :, 1] << 4).flatten(1), pairs


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()
