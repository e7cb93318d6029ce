"""Using a model's weights from other modules, and noticing when they change."""

import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeVar

from torch import Tensor, nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def share_modules(module: AnyModule) -> AnyModule:
    """A copy of a module tree with new modules and the same parameters, buffers and hooks.

    Modules of the copy can be replaced, and the original does not change.
    """
    return _share(module, {})


def _share(module, copies: dict):
    if id(module) not in copies:
        copied = copies[id(module)] = copy.copy(module)
        copied._parameters, copied._buffers = dict(module._parameters), dict(module._buffers)
        copied._modules = {name: child and _share(child, copies) for name, child in module._modules.items()}
    return copies[id(module)]


def adjacent(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """What torch.cat would give along dim as a view, if the tensors lie like that in memory, else None."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        same_storage = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same_storage or tensor.data_ptr() != end or tensor.stride() != first.stride():
            return None
        end += tensor.size(dim) * tensor.stride(dim) * tensor.element_size()
    shape = list(first.shape)
    shape[dim] = sum(tensor.size(dim) for tensor in tensors)
    whole = first.detach().as_strided(shape, first.stride())
    return whole if whole.is_contiguous() else None


class Fingerprint:
    """Tells whether a module tree has other submodules or parameters than before, or stores these elsewhere.

    `matches` is called for every decoded token, so it does its work in few calls of C functions.
    """

    def __init__(self, root: nn.Module, values: bool = False):
        """values=True notices edits of the numbers, too; for those who hold copies of them."""
        every = [t for module in root.modules() for t in (module._modules, module._parameters, module._buffers)]
        self._tables = [table for table in every if table]
        self._snapshots = [dict(table) for table in self._tables]
        self._tensors = [entry for table in self._tables for entry in table.values() if isinstance(entry, Tensor)]
        self._single = [
            (t, k, e) for t in self._tables for k, e in t.items() if isinstance(e, Tensor) and e.numel() < 2
        ]
        self._versioned = [tensor for tensor in self._tensors if values and not tensor.is_inference()]
        self._held = [tensor.detach() for tensor in self._tensors]  # so that no new storage gets an old one's address
        self._storage = self._read_storage()

    def matches(self) -> bool:
        try:
            same_entries = self._tables == self._snapshots
        except RuntimeError:  # of comparing two different tensors of several elements; the same one is not compared
            return False
        same_entries = same_entries and all(table[key] is entry for table, key, entry in self._single)
        return same_entries and self._read_storage() == self._storage

    def _read_storage(self) -> tuple[list, ...]:
        return (
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(attrgetter("_version"), self._versioned)),
        )
