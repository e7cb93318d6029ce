"""The KV cache of one block: keys and values of the tokens processed so far."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values, each (B, n_kv_heads, T, head_dim), with rotary positions already applied to the keys.

    A cache is immutable: `append` returns a longer one, so one prefill can be continued many times. Caches share a
    buffer that doubles when it is full, so appending T tokens one by one costs O(T) copies in total.
    """

    __slots__ = ("_buffer", "key", "value")

    def __init__(self, key: Tensor, value: Tensor, _buffer: "_Buffer | None" = None):
        self.key, self.value, self._buffer = key, value, _buffer

    @property
    def length(self) -> int:
        return self.key.size(-2)

    def append(self, key: Tensor, value: Tensor) -> "KVCache":
        """A longer cache with the new tokens' key and value, (B, n_kv_heads, T_new, head_dim)."""
        if torch.is_grad_enabled():  # autograd needs new tensors, not views of a buffer that changes
            return KVCache(torch.cat([self.key, key], -2), torch.cat([self.value, value], -2))
        longer = self.reserve(key.size(-2))
        longer.key[..., self.length :, :] = key
        longer.value[..., self.length :, :] = value
        return longer

    def reserve(self, n: int) -> "KVCache":
        """A cache longer by n tokens, whose keys and values the caller writes, here or into `buffer`."""
        buffer, length = self._buffer, self.length + n
        if buffer is None or not buffer.can_write(self.length, length):
            buffer = _Buffer(self.key, self.value, capacity=2 * length)  # first append, a second continuation, or full
        buffer.filled = length
        return KVCache(buffer.key[..., :length, :], buffer.value[..., :length, :], buffer)

    @property
    def buffer(self) -> tuple[Tensor, Tensor]:
        """The whole buffer of a reserved cache, keys and values: this cache, then finite unused capacity."""
        assert self._buffer is not None  # only a reserved cache has one
        return self._buffer.key, self._buffer.value

    def first(self, n: int) -> "KVCache":
        """The cache of the first n tokens."""
        return KVCache(self.key[..., :n, :], self.value[..., :n, :])

    def rows(self, index: Tensor) -> "KVCache":
        """A copy of the batch rows index (B_new,), in that order; a row may occur more than once."""
        return KVCache(self.key.index_select(0, index), self.value.index_select(0, index))


class _Buffer:
    """Capacity shared by several caches; only a cache that ends at `filled` may write behind itself."""

    __slots__ = ("filled", "key", "value")

    def __init__(self, key: Tensor, value: Tensor, capacity: int):
        self.filled = key.size(-2)
        self.key, self.value = (old.new_zeros(*old.shape[:-2], capacity, old.size(-1)) for old in (key, value))
        self.key[..., : self.filled, :] = key
        self.value[..., : self.filled, :] = value

    def can_write(self, start: int, stop: int) -> bool:
        """Whether positions start to stop - 1 are unused, fit, and are writable under torch's inference mode."""
        writable = torch.is_inference_mode_enabled() or not self.key.is_inference()
        return writable and start == self.filled and stop <= self.key.size(-2)
