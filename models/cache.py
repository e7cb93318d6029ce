"""The KV cache: keys and values of the tokens processed so far, of one block and of all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.common.errors import InputError

CAPACITY_STEP = 16  # tokens; a buffer's capacity is a multiple of it


class KVCache:
    """Keys and values, each (B, n_kv_heads, T, head_dim), with rotary positions already applied to the keys.

    A cache is immutable: `append` returns a longer one, so one prefill can be continued many times. Caches share a
    buffer that grows by an eighth when it is full, see `capacity_for`.
    """

    __slots__ = ("_buffer", "key", "value")

    def __init__(self, key: Tensor, value: Tensor, _buffer: "_Buffer | None" = None):
        self.key = key
        self.value = value
        self._buffer = _buffer

    @property
    def length(self) -> int:
        return self.key.size(-2)

    @property
    def bytes_used(self) -> int:
        """Bytes of the keys and values of this cache's tokens."""
        return self.key.nbytes + self.value.nbytes

    @property
    def bytes_allocated(self) -> int:
        """Bytes of the memory that this cache keeps alive, unused capacity included."""
        return storage_bytes((self.key, self.value))

    def append(self, key: Tensor, value: Tensor) -> "KVCache":
        """A longer cache with the new tokens' key and value, (B, n_kv_heads, T_new, head_dim)."""
        if key.size(0) != self.key.size(0):  # not len, of which torch.export makes a constant
            raise InputError(f"{len(key)} new rows do not continue a cache of {len(self.key)}; pass one for each")
        if torch.is_grad_enabled():  # autograd needs new tensors, not views of a buffer that changes
            return KVCache(torch.cat([self.key, key], -2), torch.cat([self.value, value], -2))
        buffer = self._buffer
        longer = self.length + key.size(-2)
        if buffer is None or not buffer.can_write(self.length, longer):
            buffer = _Buffer(self.key, self.value, capacity_for(longer))  # first append, a second continuation, or full
        return KVCache(*buffer.write(key, value), buffer)

    def first(self, n: int) -> "KVCache":
        """The cache of the first n tokens."""
        return KVCache(self.key[..., :n, :], self.value[..., :n, :])

    def rows(self, index: Tensor) -> "KVCache":
        """A copy of the batch rows index (B_new,), in that order; a row may occur more than once."""
        return KVCache(self.key.index_select(0, index), self.value.index_select(0, index))


@dataclass(frozen=True)
class PrefillState:
    """A prefilled batch of sequences: the keys and values of every block, and which positions are padding."""

    kv_cache: Sequence[KVCache]  # one per block
    attention_mask: Tensor | None = None  # (B, length); None without padding

    @property
    def length(self) -> int:
        return self.kv_cache[0].length

    def first(self, n: int) -> "PrefillState":
        """The first n positions."""
        if n == self.length:
            return self
        mask = None if self.attention_mask is None else self.attention_mask[:, :n]
        return PrefillState([kv.first(n) for kv in self.kv_cache], mask)

    def rows(self, index: Tensor) -> "PrefillState":
        """A copy of the rows index (B_new,), in that order; a row may occur more than once."""
        mask = None if self.attention_mask is None else self.attention_mask[index]
        return PrefillState([kv.rows(index) for kv in self.kv_cache], mask)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors; a storage that several of them share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def capacity_for(length: int) -> int:
    """Tokens to allocate for a cache of length tokens that may grow: an eighth more and at most a step of 16.

    Appending tokens one by one copies each of them some 8 times in all, and a quarter of the memory is unused at most.
    """
    return (length + length // 8 + CAPACITY_STEP) // CAPACITY_STEP * CAPACITY_STEP


class _Buffer:
    """Capacity shared by several caches; only a cache that ends at `filled` may write behind itself."""

    __slots__ = ("filled", "key", "value")

    def __init__(self, key: Tensor, value: Tensor, capacity: int):
        self.filled = key.size(-2)
        self.key = _grow(key, capacity)
        self.value = _grow(value, capacity)

    def can_write(self, start: int, stop: int) -> bool:
        """True if positions start to stop - 1 are unused, fit, and are writable under torch's inference mode."""
        writable = torch.is_inference_mode_enabled() or not self.key.is_inference()
        return writable and start == self.filled and stop <= self.key.size(-2)

    def write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the next tokens; views of the keys and values of all."""
        start = self.filled
        self.filled += key.size(-2)
        self.key[..., start : self.filled, :] = key
        self.value[..., start : self.filled, :] = value
        return self.key[..., : self.filled, :], self.value[..., : self.filled, :]


def _grow(old: Tensor, capacity: int) -> Tensor:
    """A copy of old (..., T, head_dim) at the start of a tensor (..., capacity, head_dim)."""
    new = old.new_empty(*old.shape[:-2], capacity, old.size(-1))
    new[..., : old.size(-2), :] = old
    return new
