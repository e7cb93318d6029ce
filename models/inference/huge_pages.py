"""Huge pages for weights that are read at every token: fewer entries of the CPU's address cache are needed."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 * 2**20  # bytes
ALIGNMENT = 64  # bytes of a cache line


def move_to_huge_pages(tensors: Sequence[Tensor]) -> None:
    """Move tensors on the CPU, in place, into one block of memory that asks Linux for huge pages.

    Where the system has none, or offers them always, only the addresses change.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, sum(sizes) + 2 * HUGE_PAGE, flags=flags)
    with suppress(OSError):  # of a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    start = -block.data_ptr() % HUGE_PAGE
    for tensor, size in zip(tensors, sizes):
        place = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor)
        start += size
