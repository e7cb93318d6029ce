"""The keys and values of all blocks in one tensor, as the kernels read and write them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.cache import KVCache, capacity_for


def empty_cache(network: Any, n_sequences: int, capacity: int) -> Tensor:
    """Zeros (n_blocks, 2, n_sequences, n_kv_heads, capacity, head_dim) for `run` of a KernelNetwork or PlainNetwork."""
    cfg = network.model.cfg
    shape = cfg.lm_n_blocks, 2, n_sequences, cfg.lm_n_kv_heads, capacity, cfg.lm_head_dim
    return torch.zeros(shape, dtype=network.cache_dtype, device=network.model.device)


class StackedCache(Sequence[KVCache]):
    """The caches of all blocks: the first `length` tokens of data (n_blocks, 2, B, n_kv_heads, capacity, head_dim).

    Like KVCache it is a value: `extend` returns a longer one, which shares the memory unless another continuation
    already took the place.
    """

    def __init__(self, data: Tensor, length: int, filled: list[int] | None = None):
        self.data, self.length = data, length
        self._filled = [length] if filled is None else filled  # tokens in data, for all caches that share it

    @classmethod
    def of(cls, kv_cache: Sequence[KVCache], like: Tensor, n: int) -> "StackedCache":
        """A copy of other caches, in the dtype and on the device of like, with capacity for n tokens more."""
        B, heads, length, D = kv_cache[0].key.shape
        data = like.new_empty(len(kv_cache), 2, B, heads, capacity_for(length + n), D)
        for block, kv in zip(data, kv_cache):
            block[0, :, :, :length], block[1, :, :, :length] = kv.key, kv.value
        return cls(data, length)

    def extend(self, n: int) -> "StackedCache":
        """A cache longer by n tokens, whose keys and values the caller writes into `data`."""
        fits = self._filled[0] == self.length and self.length + n <= self.data.size(4)
        if not fits or (self.data.is_inference() and not torch.is_inference_mode_enabled()):
            return StackedCache.of(self, self.data, n).extend(n)
        self._filled[0] = self.length + n
        return StackedCache(self.data, self.length + n, self._filled)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> KVCache:  # type: ignore[override]  # nobody asks for a slice of blocks
        key, value = self.data[index, :, :, :, : self.length]
        return KVCache(key, value)
