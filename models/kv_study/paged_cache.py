"""A paged cache: blocks of a few tokens, found through a block table, shared until somebody writes.

This is the memory manager of vLLM's PagedAttention (Kwon et al. 2023), in PyTorch. A sequence owns a table of block
numbers; blocks count their references. vLLM's kernel reads blocks in place; `key` and `value` here copy them.

Copy-on-write makes a cache a value, like KVCache: the first sequence that continues a half-full block writes into it,
another one copies it. After a rollback by `first`, a block that no other cache refers to is written again.
"""

from itertools import chain

import torch
from torch import Tensor

from models.common.errors import InputError


class BlockPool:
    """Memory for n_blocks blocks of block_size tokens; keys and values each (n_kv_heads, n_blocks, block_size, D)."""

    def __init__(self, n_blocks: int, block_size: int = 16):
        if n_blocks < 1 or block_size < 1:
            raise InputError(f"n_blocks={n_blocks} and block_size={block_size} must be 1 or more")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.references = [0] * n_blocks
        self.filled = [0] * n_blocks
        self.free = list(reversed(range(n_blocks)))
        self.key = self.value = torch.empty(0)

    def take(self) -> int:
        """A free block, with one reference."""
        if not self.free:
            raise InputError(f"all {self.n_blocks} blocks of {self.block_size} tokens are in use; make the pool larger")
        block = self.free.pop()
        self.references[block] = 1
        self.filled[block] = 0
        return block

    def drop(self, block: int) -> None:
        """Give up one reference."""
        self.references[block] -= 1
        if not self.references[block]:
            self.free.append(block)

    def copy(self, block: int) -> int:
        """A new block with the same content; the caller's reference moves to it."""
        new = self.take()
        self.key[:, new], self.value[:, new] = self.key[:, block], self.value[:, block]
        self.drop(block)
        return new


class PagedKV:
    """One block table per row of the batch, all of the same length; empty without tables. `append` leaves it valid."""

    def __init__(self, pool: BlockPool, tables: list[list[int]] | None = None, length: int = 0):
        self.pool = pool
        self.tables = tables or []
        self.length = length
        for block in chain(*self.tables):
            pool.references[block] += 1
        self._index: Tensor | None = None

    def __del__(self):
        for block in chain(*self.tables):
            self.pool.drop(block)

    key = property(lambda self: self._gather(self.pool.key))
    value = property(lambda self: self._gather(self.pool.value))

    @property
    def bytes_used(self) -> int:
        """Bytes of the pool's blocks that any sequence refers to."""
        pool = self.pool
        return (pool.key.nbytes + pool.value.nbytes) // pool.n_blocks * (pool.n_blocks - len(pool.free))

    def _gather(self, blocks: Tensor) -> Tensor:
        """(B, n_kv_heads, length, D) from the pool's (n_kv_heads, n_blocks, block_size, D)."""
        if self._index is None:
            self._index = torch.tensor(self.tables, device=blocks.device)
        gathered = blocks.index_select(1, self._index.flatten())
        return gathered.view(len(blocks), len(self.tables), -1, blocks.size(-1)).transpose(0, 1)[:, :, : self.length]

    def append(self, key: Tensor, value: Tensor) -> "PagedKV":
        """This cache and then the new tokens' key and value, (B, n_kv_heads, T_new, D), without gradient."""
        pool = self.pool
        if not pool.key.numel():  # the first write knows shape, dtype and device
            shape = (key.size(1), pool.n_blocks, pool.block_size, key.size(-1))
            with torch.inference_mode(False):  # so that it may be written inside and outside of that mode
                pool.key, pool.value = (torch.zeros(shape, dtype=key.dtype, device=key.device) for _ in range(2))
        longer = PagedKV(pool, [list(table) for table in self.tables or [[]] * len(key)], self.length)
        for table in longer.tables:
            longer._make_room(table, key.size(2))
        positions = torch.arange(self.length, self.length + key.size(2), device=key.device)
        longer.length += len(positions)
        longer._index = torch.tensor(longer.tables, device=key.device)
        blocks = longer._index[:, positions // pool.block_size]  # (B, T_new)
        slots = (positions % pool.block_size).expand_as(blocks)
        pool.key[:, blocks, slots] = key.detach().transpose(0, 1)
        pool.value[:, blocks, slots] = value.detach().transpose(0, 1)
        return longer

    def _make_room(self, table: list[int], n: int) -> None:
        """Extend the table by room for n tokens, and copy its last block if another cache continued that."""
        pool = self.pool
        size = pool.block_size
        start, stop = self.length, self.length + n
        is_continued = start % size and pool.filled[table[-1]] != start % size
        if is_continued and pool.references[table[-1]] > 2:  # by more than this cache and its new continuation
            table[-1] = pool.copy(table[-1])
        while len(table) * size < stop:
            table.append(pool.take())
        for i in range(start // size, len(table)):
            pool.filled[table[i]] = min(size, stop - i * size)

    def first(self, n: int) -> "PagedKV":
        """This cache as it was after its first n tokens; copies no token."""
        return PagedKV(self.pool, [table[: -(-n // self.pool.block_size)] for table in self.tables], n)

    def rows(self, index: Tensor) -> "PagedKV":
        """The chosen rows of the batch, index (B_new,), as often as named; copies no token."""
        return PagedKV(self.pool, [self.tables[i] for i in index.tolist()], self.length)
