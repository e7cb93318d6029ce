"""Linear layers with weights in 8 or 4 bits, in the layout that the kernels read."""

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.common.errors import InputError
from models.inference.kernels.load import chosen_level, load_library

KERNEL_DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # the numbers in common.h
GROUP_SIZE = 32  # weights of a row that share a scale and a minimum in int4
ROW_MULTIPLE = 64  # stored rows are padded to it
FIT_STEPS = 3  # reduce the squared error by 7%; more steps add less than 1%
FIT_ROWS = 256  # of a weight at a time, which fit the cache
DTYPES = {"data": torch.uint8, "scale": torch.float32, "groups": torch.int32}
FORWARD_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
HUGE_PAGE = 2 * 2**20  # bytes
CACHE_LINE = 64


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight. Without kernels, each call dequantizes it: that saves memory, not time.

    int8: `data` (out, stride) uint8 holds 128 + value, and a row's values times its entry of `scale` (out,) float32 are
    the mixed weight (see `mix`), by which the kernels multiply mixed activations. int4: `data` (out, stride / 2) uint8
    holds 64 values of a row in 32 bytes, the first 32 in the lower halves; `groups` (out, stride / 32) int32 holds a
    scale and a minimum in bfloat16 for 32 values, the scale in the lower half. stride is in_features rounded up to a
    multiple of 64.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, format: str = "int8"):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.format = format
        self.stride = -(-self.in_features // ROW_MULTIPLE) * ROW_MULTIPLE
        fitted = _fit_by_kernels(weight.detach(), self.stride) if format == "int8" else None
        if fitted is None:
            fit = _fit_int8 if format == "int8" else _fit_int4
            padding = self.stride - self.in_features
            parts = [fit(rows.float().contiguous(), padding) for rows in weight.detach().split(FIT_ROWS)]
            fitted = [torch.cat(part) for part in zip(*parts)]
        data, scales = (nn.Parameter(part, requires_grad=False) for part in fitted)
        self.data = data
        self.scale = scales if format == "int8" else None
        self.groups = None if format == "int8" else scales
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def check(self) -> None:
        """Raise InputError unless the quantized weight still has its dtypes, which `.bfloat16()` would change."""
        for name, dtype in DTYPES.items():
            x = getattr(self, name)
            if x is not None and (x.dtype != dtype or len(x) != self.out_features or not x.is_contiguous()):
                raise InputError(
                    f"{name} of a quantized layer is {x.dtype} {tuple(x.shape)}, not {dtype}; "
                    "convert the floating-point model, and quantize it then"
                )

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features)."""
        return F.linear(x, self.dequantize(x.dtype), self.bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight (out, in) that the layer acts as."""
        n = self.out_features
        if self.scale is not None:
            weight = mix((self.data.float() - 128) * self.scale[:, None])
        else:
            assert self.groups is not None
            pairs = self.data.view(n, -1, 1, GROUP_SIZE)
            values = torch.cat([pairs & 15, pairs >> 4], dim=2).view(n, -1, GROUP_SIZE)
            step, minimum = self.groups.view(torch.bfloat16).view(n, -1, 2, 1).float().unbind(2)
            weight = (values * step + minimum).flatten(1)
        return weight[:, : self.in_features].to(dtype)


def mix(x: Tensor) -> Tensor:
    """x (..., n), each ROW_MULTIPLE values times a Hadamard matrix / 8, which is its own inverse and keeps products.

    It spreads a large value over its group, so that the values that share a scale in int8 differ less in size (QuaRot,
    Ashkboos et al. 2024). n is a multiple of ROW_MULTIPLE.
    """
    matrix = x.new_ones(1, 1)
    while len(matrix) < ROW_MULTIPLE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.unflatten(-1, (-1, ROW_MULTIPLE)) @ matrix / ROW_MULTIPLE**0.5).flatten(-2)


def find_library(x: Any) -> tuple[str, ctypes.CDLL] | None:
    """The CPU's level and its kernels; None where a tensor's or model's device or dtype, or this CPU, has none."""
    level = chosen_level() if x.device.type == "cpu" and x.dtype in KERNEL_DTYPES else None
    library = None if level is None else load_library(level)
    return None if level is None or library is None else (level, library)


def _fit_by_kernels(weight: Tensor, stride: int) -> Sequence[Tensor] | None:
    """`_fit_int8` by the kernels, but for rounding of sums; None where there are none."""
    found = find_library(weight)
    if found is None:
        return None
    _, library = found
    weight = weight.contiguous()
    data = torch.empty(len(weight), stride, dtype=torch.uint8)
    scale = torch.empty(len(weight))
    source, *fitted = (ctypes.c_void_p(x.data_ptr()) for x in (weight, data, scale))
    sizes = (ctypes.c_long(n) for n in (KERNEL_DTYPES[weight.dtype], *weight.shape))
    library.quantize_weight(source, *sizes, *fitted, torch.get_num_threads())
    return data, scale


def _fit_int8(weight: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """`data` and `scale` of a weight (n, in) float32."""
    weight = mix(F.pad(weight, (0, padding)))
    scale = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    values = (weight / scale[:, None]).round_().clamp_(-127, 127).add_(128)
    return values.to(torch.uint8), scale


def _fit_int4(weight: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """`data` and `groups` of a weight (n, in) float32.

    From each group's range on, values and the line through them are fitted in turns, as in Lloyd's algorithm.
    """
    groups = F.pad(weight, (0, padding)).view(len(weight), -1, GROUP_SIZE)
    smallest = torch.finfo(torch.bfloat16).tiny
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = _rounded(((high - low) / 15).clamp_min(smallest))
    minimum = _rounded(low)
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


def quantize_linears(module: nn.Module, format: str) -> None:
    """Replace, in place, every linear layer inside module by a QuantizedLinear; LoRA adapters are merged into it.

    With int4 a layer named `head` is stored in int8: four bits there cost more than in all other layers together. A
    head that shares its weight with the embedding is quantized, the embedding is not. Raises InputError for a module
    that is quantized already, and for other subclasses of nn.Linear.
    """
    from models.lora import LoRALinear  # here, as a caption without quantization needs no adapters

    for name, child in list(module.named_children()):
        if isinstance(child, QuantizedLinear):
            raise InputError(f"{name} is quantized already; quantize the floating-point model instead")
        if not isinstance(child, nn.Linear):
            quantize_linears(child, format)
            continue
        if type(child) not in (nn.Linear, LoRALinear):
            raise InputError(f"{name} is a {type(child).__name__}, which quantization does not know; merge it first")
        if "forward" in vars(child):
            raise InputError(
                f"{name} has a forward of its own, which quantization would drop; use the unquantized model"
            )
        weight = child.merged() if isinstance(child, LoRALinear) else child.weight
        quantized = QuantizedLinear(weight, child.bias, "int8" if name == "head" else format)
        for hooks in FORWARD_HOOKS:
            getattr(quantized, hooks).update(getattr(child, hooks))
        setattr(module, name, quantized)


def move_to_huge_pages(tensors: Sequence[Tensor]) -> None:
    """Move tensors on the CPU, in place, into one block of memory that asks Linux for huge pages.

    Weights that are read at every token then need fewer entries of the CPU's address cache. Where the system has no
    such pages, or offers them always, only the addresses change.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    sizes = [-(-tensor.nbytes // CACHE_LINE) * CACHE_LINE for tensor in tensors]
    memory = mmap.mmap(-1, sum(sizes) + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    start = -block.data_ptr() % HUGE_PAGE
    for tensor, size in zip(tensors, sizes):
        place = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor)
        start += size
