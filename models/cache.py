"""What one block's attention remembers: the keys and values of the tokens it has read."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values, each (B, n_kv_heads, T, head_dim), with rotary positions already applied to the keys.

    A cache is a value: `append` returns a longer one and leaves this one as it was, so one prefill can be
    continued many times. Both are views of a shared buffer that doubles when it is full, which makes
    appending T tokens one by one cost O(T) copies in all.
    """

    __slots__ = ("_buffer", "key", "value")

    def __init__(self, key: Tensor, value: Tensor, _buffer: "_Buffer | None" = None):
        self.key, self.value, self._buffer = key, value, _buffer

    @property
    def length(self) -> int:
        return self.key.size(-2)

    def append(self, key: Tensor, value: Tensor) -> "KVCache":
        """This cache and then the new tokens' key and value, (B, n_kv_heads, T_new, head_dim)."""
        if torch.is_grad_enabled():  # autograd wants fresh tensors, not views of a buffer that changes
            return KVCache(torch.cat([self.key, key], -2), torch.cat([self.value, value], -2))
        longer = self.reserve(key.size(-2))
        longer.key[..., self.length :, :] = key
        longer.value[..., self.length :, :] = value
        return longer

    def reserve(self, n: int) -> "KVCache":
        """This cache and then n tokens, whose keys and values are the caller's to write, here or into `buffer`."""
        buffer, length = self._buffer, self.length + n
        if buffer is None or not buffer.takes(self.length, length):
            buffer = _Buffer(self.key, self.value, room=2 * length)  # first append, a fork, or full
        buffer.filled = length
        return KVCache(buffer.key[..., :length, :], buffer.value[..., :length, :], buffer)

    @property
    def buffer(self) -> tuple[Tensor, Tensor]:
        """What a cache that was reserved is the beginning of: its keys and values, and room that was never NaN."""
        assert self._buffer is not None  # only a reserved cache has one
        return self._buffer.key, self._buffer.value

    def first(self, n: int) -> "KVCache":
        """This cache as it was after its first n tokens."""
        return KVCache(self.key[..., :n, :], self.value[..., :n, :])

    def rows(self, index: Tensor) -> "KVCache":
        """The chosen rows of the batch, index (B_new,), in that order and as often as named; a copy."""
        return KVCache(self.key.index_select(0, index), self.value.index_select(0, index))


class _Buffer:
    """Room for keys and values that several caches read; only the one that ends where it is filled writes."""

    __slots__ = ("filled", "key", "value")

    def __init__(self, key: Tensor, value: Tensor, room: int):
        self.filled = key.size(-2)
        self.key, self.value = (old.new_zeros(*old.shape[:-2], room, old.size(-1)) for old in (key, value))
        self.key[..., : self.filled, :] = key
        self.value[..., : self.filled, :] = value

    def takes(self, start: int, stop: int) -> bool:
        """Whether tokens start ... stop - 1 may be written here: nobody has yet, they fit, and torch allows it."""
        writable = torch.is_inference_mode_enabled() or not self.key.is_inference()
        return writable and start == self.filled and stop <= self.key.size(-2)
