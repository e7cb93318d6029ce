"""Quantized caches: keys and values as integers of 8, 4 or 2 bits, with scales; attention reads them multiplied back.

Numbers that share a scale are stored as (x - lowest) / scale, rounded, where the scale is their range divided by
2^bits - 1. In float32 an error is at most half a scale; in bfloat16 the rounding of scale and lowest value adds to it.
Nothing that is cached is quantized again, and nothing is calibrated.

- `group=1`: one scale for each token and head, of keys and of values alike (ZeroQuant's token-wise scales, Yao et al.
  2022, per head). It is enough for 8 bits.
- `group=32` is KIVI (Liu et al. 2024): a few channels of the keys are large for all tokens, so that a scale per token
  leaves few levels for the others. Keys have one scale per channel and group of 32 tokens, values still one per token.
  Tokens that do not fill a group yet are kept as they are.

In PyTorch that saves memory, not time: each step makes a float copy; a fused kernel would dequantize in registers.
"""

from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.common.errors import InputError


def quantize(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., D) as packed bytes (..., D * bits / 8), scales and lowest values, one of each along dim."""
    per_byte = 8 // bits
    if x.size(-1) % per_byte:
        raise InputError(f"heads of {x.size(-1)} numbers do not fill bytes of {per_byte} at bits={bits}; use more bits")
    low, high = (bound.float() for bound in x.aminmax(dim=dim, keepdim=True))
    scale = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(x.dtype).tiny).to(x.dtype)
    low = low.to(x.dtype)
    numbers = ((x.float() - low.float()) / scale.float()).round().clamp(0, 2**bits - 1).to(torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)
    packed = (numbers.unflatten(-1, (-1, len(shifts))) << shifts).sum(-1, dtype=torch.uint8)
    return packed, scale, low


def dequantize(packed: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2) * scale + low


@dataclass(frozen=True)
class QuantizedTokens:
    """Keys or values (B, H, S, D): whole groups (B, H, S // group, group, D) with scales along dim, and the rest."""

    bits: int
    group: int
    dim: int
    parts: tuple[Tensor, ...] = ()  # packed bytes, scales, lowest values, and the tokens of no whole group

    def append(self, x: Tensor) -> "QuantizedTokens":
        x = torch.cat([self.parts[3], x], 2) if self.parts else x
        n = x.size(2) // self.group
        new: tuple[Tensor, ...] = quantize(x[:, :, : n * self.group].unflatten(2, (n, self.group)), self.bits, self.dim)
        if self.parts:
            new = tuple(torch.cat(pair, 2) for pair in zip(self.parts, new))
        return replace(self, parts=(*new, x[:, :, n * self.group :].clone()))

    def read(self) -> Tensor:
        packed, scale, low, rest = self.parts
        return torch.cat([dequantize(packed, scale, low, self.bits).flatten(2, 3), rest], 2)

    def rows(self, index: Tensor) -> "QuantizedTokens":
        return replace(self, parts=tuple(part.index_select(0, index) for part in self.parts))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class QuantizedKV:
    """A quantized cache of one block. A value like KVCache: `append` leaves this cache valid."""

    def __init__(self, bits: int = 8, group: int = 1):
        if bits not in (2, 4, 8) or group < 1:
            raise InputError(f"bits={bits} must be 2, 4 or 8, and group={group} 1 or more")
        self.length = 0
        self._value = QuantizedTokens(bits, group, -1)
        self._key = QuantizedTokens(bits, group, -1 if group == 1 else -2)

    key = property(lambda self: self._key.read())
    value = property(lambda self: self._value.read())

    @property
    def bytes_used(self) -> int:
        """Bytes of the cached tokens, scales included."""
        return self._key.nbytes + self._value.nbytes

    def append(self, key: Tensor, value: Tensor) -> "QuantizedKV":
        """This cache and then the new tokens' key and value, (B, n_kv_heads, T_new, head_dim), which are quantized."""
        longer = copy(self)
        longer._key = self._key.append(key.detach())
        longer._value = self._value.append(value.detach())
        longer.length += key.size(2)
        return longer

    def rows(self, index: Tensor) -> "QuantizedKV":
        """A copy of the chosen rows of the batch, index (B_new,)."""
        chosen = copy(self)
        chosen._key = self._key.rows(index)
        chosen._value = self._value.rows(index)
        return chosen
