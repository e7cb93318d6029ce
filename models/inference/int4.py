"""Group-wise int4 weights: every 32 entries of a row are 4-bit codes that share a scale and a zero point.

A weight is scale * (code - 8) + zero point, with codes from 0 to 15 and the other two in bfloat16: 5 bits a weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.inference.cpu_kernels import convert_int4, has_int4_kernel, int4_linear, int4_linear_function
from models.inference.live_weights import adjacent

GROUP_SIZE = 32
ROW_MULTIPLE = 64  # rows are padded with zeros to a multiple of it, the longest block of torch's kernel
FIT_STEPS = 3  # reduce the squared error by 7%; more steps add less than 1%
FIT_ROWS = 256  # of a weight at a time, which fit the cache

MAX_KERNEL_ROWS = 32  # of the input; for more, converting the weights to floating point first is faster
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of inputs that may be rounded to the kernel's bfloat16


@dataclass(frozen=True)
class Int4Layout:
    """Which two codes of a column share a byte, in blocks of rows: neighbors, or the same row of both half blocks."""

    rows: int = ROW_MULTIPLE  # of a block
    neighbors: bool = False

    def pack(self, codes: Tensor) -> Tensor:
        """Codes (out, in) uint8 as bytes (out, in / 2), block by block."""
        blocks = codes.view(-1, self.rows, codes.size(1)).transpose(1, 2)
        low, high = (blocks[..., ::2], blocks[..., 1::2]) if self.neighbors else blocks.chunk(2, dim=-1)
        return (low | high << 4).reshape(len(codes), -1).contiguous()

    def unpack(self, packed: Tensor) -> Tensor:
        """Codes, transposed: (in, out) uint8."""
        width = 2 * packed.size(1)
        blocks = packed.view(-1, width, self.rows // 2).transpose(0, 1)
        parts = [blocks & 15, blocks >> 4]
        codes = torch.stack(parts, dim=-1) if self.neighbors else torch.cat(parts, dim=-1)
        return codes.reshape(width, -1)


@cache
def _kernel_layout() -> Int4Layout | None:
    """The layout that torch's kernel reads, which depends on the processor; None if it is not known here."""
    codes = torch.arange(ROW_MULTIPLE * GROUP_SIZE).mul(7).remainder(13).view(ROW_MULTIPLE, GROUP_SIZE).to(torch.uint8)
    try:
        packed = convert_int4(codes)
    except RuntimeError:
        return None
    layouts = [Int4Layout(rows, neighbors) for rows in (64, 32, 16) for neighbors in (False, True)]
    return next((layout for layout in layouts if torch.equal(layout.pack(codes), packed)), None)


def kernel_layout() -> Int4Layout | None:
    """The layout that torch's int4 kernel for CPUs reads; None without the kernel."""
    return _kernel_layout() if has_int4_kernel() else None


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (out, in) uint8 and (in / 32, out, 2) bfloat16, scales and zero points, of a weight (out, in).

    Starting from each group's range, codes and the line through them are fitted in turns, which reduces the squared
    error as in Lloyd's algorithm.
    """
    codes, lines = zip(*(_fit(rows.detach().float()) for rows in weight.split(FIT_ROWS)))
    return torch.cat(codes), torch.cat(lines).transpose(0, 1).contiguous()


def _fit(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_groups` of a few rows (n, in); the second result is (n, in / 32, 2)."""
    groups = rows.view(len(rows), -1, GROUP_SIZE)
    smallest, (low, high) = torch.finfo(torch.bfloat16).tiny, groups.aminmax(dim=-1, keepdim=True)
    scale = _rounded(((high - low) / 15).clamp_min(smallest))
    zero_point, mean = _rounded(low + 8 * scale), groups.mean(-1, keepdim=True)
    for _ in range(FIT_STEPS):
        codes = ((groups - zero_point) / scale).round_().clamp_(-8, 7)
        center = codes.mean(-1, keepdim=True)
        codes = codes - center
        variance = codes.square().sum(-1, keepdim=True)
        slope = (codes * groups).sum(-1, keepdim=True) / variance
        scale = _rounded(torch.where(variance > 0, slope, scale).clamp_min(smallest))
        zero_point = _rounded(mean - scale * center)
    codes = ((groups - zero_point) / scale).round_().clamp_(-8, 7)
    return (codes + 8).to(torch.uint8).view_as(rows), torch.cat([scale, zero_point], dim=-1).bfloat16()


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class Int4Linear(nn.Module):
    """A linear layer with a group-wise int4 weight. in_features must be a multiple of 32.

    Inputs of up to 32 rows are multiplied by torch's kernel on a CPU, rounded to bfloat16 first and the product too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype  # of inputs
        self.layout = kernel_layout() or Int4Layout()
        codes, scale = quantize_groups(weight)
        padding = -self.out_features % ROW_MULTIPLE
        codes, scale = F.pad(codes, (0, 0, 0, padding)), F.pad(scale, (0, 0, 0, padding))
        self.weight = nn.Parameter(self.layout.pack(codes), requires_grad=False)  # (out, in / 2) uint8
        self.scale = nn.Parameter(scale, requires_grad=False)  # (in / 32, out, 2), with zero points
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features)."""
        rows = x.reshape(-1, self.in_features)
        if self.kernel_fits(x.dtype) and len(rows) <= MAX_KERNEL_ROWS:
            y = int4_linear(rows.bfloat16(), self.weight, self.scale.contiguous(), GROUP_SIZE)
            y = y[:, : self.out_features].to(x.dtype)
        else:
            y = rows @ self.dequantize(x.dtype)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight that the layer acts as, transposed: (in_features, out_features)."""
        return dequantize_int4(self.weight, self.scale, self.layout, dtype)[:, : self.out_features]

    def kernel_fits(self, dtype: torch.dtype) -> bool:
        """Whether torch's kernel can multiply inputs of that dtype by this weight."""
        return dtype in DTYPES and self.weight.device.type == "cpu" and self.layout == kernel_layout()


def dequantize_int4(packed: Tensor, scale: Tensor, layout: Int4Layout, dtype: torch.dtype) -> Tensor:
    """The weight of packed bytes (out, in / 2) and scales and zero points (in / 32, out, 2), transposed: (in, out)."""
    scale, zero_point = scale.to(dtype).permute(2, 0, 1).contiguous()[:, :, None]
    codes = layout.unpack(packed).sub_(8).view(torch.int8)  # wraps to -8 to 7
    groups = codes.to(dtype).view(-1, GROUP_SIZE, len(packed))
    return torch.addcmul(zero_point, groups, scale).view(-1, len(packed))


def pack_int4(linears: Sequence[Int4Linear]) -> None:
    """Store layers of one input adjacent in memory, so that one product can read them; padded ones are left alone."""
    if any(linear.out_features % ROW_MULTIPLE for linear in linears):
        return
    sizes = [linear.out_features for linear in linears]
    weights = torch.cat([linear.weight for linear in linears]).split(sizes)
    scales = torch.cat([linear.scale for linear in linears], dim=1).split(sizes, dim=1)
    for linear, weight, scale in zip(linears, weights, scales):
        linear.weight.data, linear.scale.data = weight, scale


def int4_gemv(linears: Sequence[Int4Linear]) -> Callable[[Tensor], Tensor] | None:
    """A function of x (1, in) that gives the layers' outputs, concatenated, by one product; None if it takes several.

    A decode step calls it four times per block, so the kernel is chosen in advance.
    """
    first, n_out = linears[0], sum(linear.out_features for linear in linears)
    weight, scale = adjacent([linear.weight for linear in linears]), adjacent([linear.scale for linear in linears], 1)
    if weight is None or scale is None or not first.kernel_fits(first.dtype):
        return None
    matmul = int4_linear_function(weight, scale, GROUP_SIZE)
    if first.dtype == torch.bfloat16:
        return matmul if n_out == len(weight) else lambda x: matmul(x)[:, :n_out]
    return lambda x: matmul(x.bfloat16())[:, :n_out].to(first.dtype)
