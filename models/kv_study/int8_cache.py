"""An int8 cache: keys and values as 8-bit integers with one scale per token and head.

Each vector of head_dim numbers is divided by a 127th of its largest magnitude and rounded, when it is appended; it is
multiplied back when attention reads it. Since every token brings its own scales, nothing that is cached is ever
quantized again, and no calibration is needed. This is the token-wise dynamic quantization of ZeroQuant (Yao et al.
2022), per head, applied to the cache. FlexGen (Sheng et al. 2023) goes to 4 bits with scales per group; KIVI (Liu et
al. 2024) shows that below 8 bits keys need a scale per channel instead.

A vector takes head_dim + itemsize bytes instead of head_dim * itemsize: 0.27 of float32 at 64 channels, 0.52 of
bfloat16. The rounding error is at most 1/254 of the vector's largest magnitude. In PyTorch the float copy of the block
that is being read exists for the moment; a fused kernel would dequantize in registers.
"""

import torch
from torch import Tensor

from models.cache import KVCache


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) as int8 (..., D) and scales (..., 1) of x's dtype, so that x is about int8 * scale."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = scale.clamp(min=torch.finfo(x.dtype).tiny)  # a vector of zeros
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


class Int8KV:
    """An int8 cache of one block. A value like KVCache, of which it uses two: one for the integers, one for the scales.

    Without arguments it is empty.
    """

    def __init__(self, numbers: KVCache | None = None, scales: KVCache | None = None):
        self.numbers, self.scales = numbers, scales

    @property
    def length(self) -> int:
        return 0 if self.numbers is None else self.numbers.length

    @property
    def key(self) -> Tensor:
        assert self.numbers is not None and self.scales is not None  # an empty cache has no shape
        return self.numbers.key * self.scales.key

    @property
    def value(self) -> Tensor:
        assert self.numbers is not None and self.scales is not None
        return self.numbers.value * self.scales.value

    @property
    def bytes_used(self) -> int:
        """Bytes of the cached tokens, scales included."""
        parts = [part for part in (self.numbers, self.scales) if part is not None]
        return sum(part.bytes_used for part in parts)

    def append(self, key: Tensor, value: Tensor) -> "Int8KV":
        """This cache and then the new tokens' key and value, (B, n_kv_heads, T_new, head_dim), which are quantized."""
        (key, key_scale), (value, value_scale) = quantize(key.detach()), quantize(value.detach())
        if self.numbers is None or self.scales is None:
            return Int8KV(KVCache(key, value), KVCache(key_scale, value_scale))
        return Int8KV(self.numbers.append(key, value), self.scales.append(key_scale, value_scale))

    def first(self, n: int) -> "Int8KV":
        """This cache as it was after its first n tokens."""
        if self.numbers is None or self.scales is None:
            return self
        return Int8KV(self.numbers.first(n), self.scales.first(n))

    def rows(self, index: Tensor) -> "Int8KV":
        """A copy of the chosen rows of the batch, index (B_new,)."""
        if self.numbers is None or self.scales is None:
            return self
        return Int8KV(self.numbers.rows(index), self.scales.rows(index))
