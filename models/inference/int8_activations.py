"""Products of int8 weights with activations rounded to int8 while the model runs (dynamic quantization, W8A8).

An activation is scale * (code - 128), with codes from 1 to 255. A scale belongs to one row, or to a few rows of one
image, so a result depends neither on other sequences of a batch nor on earlier inputs, and nothing is calibrated.
Codes are unsigned because oneDNN has no fast product of signed ones on CPUs without AMX. Rounding takes several passes
over the input, which cost a fraction of the product while the rows fit the processor's cache.
"""

import torch
from torch import Tensor

from models.inference.cpu_kernels import onednn_int8_linear, pack_int8
from models.inference.quantization import Int8Linear

ZERO_POINT = 128
ROUNDING = 1.5 * 2**23  # adding it to a float32 rounds it, and leaves the integer in the lowest bits
SMALLEST = torch.finfo(torch.float32).tiny  # scale


def quantize_rows(x: Tensor, lowest: float | None = None) -> tuple[Tensor, Tensor]:
    """Codes (M, K) uint8 and the scale of each row (M, 1) float32, of x (M, K) float32, which is overwritten.

    lowest, if given, is a negative bound that no entry of x falls below, which saves looking for the smallest.
    """
    largest = (x.abs() if lowest is None else x).amax(-1, keepdim=True)
    scale = largest.clamp_min_(127 * SMALLEST if lowest is None else -lowest).div_(127)
    return torch.addcmul(_rounding(x), x, scale.reciprocal(), out=x).view(torch.int32).to(torch.uint8), scale


def quantize_tensor(x: Tensor) -> tuple[Tensor, float]:
    """Codes (M, K) uint8 and one scale for all of x (M, K) float32, which is overwritten."""
    low, high = (bound.item() for bound in x.aminmax())
    scale = max(max(-low, high) / 127, SMALLEST)
    return torch.add(_rounding(x), x, alpha=1 / scale, out=x).view(torch.int32).to(torch.uint8), scale


def _rounding(x: Tensor) -> Tensor:
    """A row (K,) that, added to scaled rows (M, K), leaves an entry's code in its lowest byte."""
    return x.new_full(x.shape[-1:], ROUNDING + ZERO_POINT)


class Int8Matmul:
    """Linear layers of one input as one product: int8 weights (out, in) packed for oneDNN, int8 activations."""

    def __init__(self, *linears: Int8Linear):
        self.weight = pack_int8(torch.cat([linear.weight.detach() for linear in linears]))
        self.scale = torch.cat([linear.scale.detach() for linear in linears]).float()
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases).float() if biases else None

    def __call__(
        self, codes: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32, gelu: bool = False
    ) -> Tensor:
        """Codes (M, in) uint8 with one scale to (M, out) in dtype, bias and on request GELU included."""
        return onednn_int8_linear(codes, scale, ZERO_POINT, self.weight, self.scale, self.bias, dtype, gelu)

    def unscaled(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Codes (M, in) uint8 to (M, out) in dtype, which the caller multiplies by the rows' scales; without bias."""
        return onednn_int8_linear(codes, 1.0, ZERO_POINT, self.weight, self.scale, None, dtype)

    def rows(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Codes (M, in) uint8 with a scale for each row (M, 1) to (M, out) float32, bias included."""
        y = self.unscaled(codes).mul_(scale)
        return y if self.bias is None else y.add_(self.bias)

    def __getstate__(self) -> dict:
        """For copies and pickles, which cannot hold a packed weight."""
        return {"weight": self.weight.to_dense().t().contiguous(), "scale": self.scale, "bias": self.bias}

    def __setstate__(self, state: dict) -> None:
        self.weight, self.scale, self.bias = pack_int8(state["weight"]), state["scale"], state["bias"]
