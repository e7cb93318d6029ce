"""Using a model's weights from other modules, and noticing when they change."""

import copy
from operator import attrgetter, is_
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


class Fingerprint:
    """Tells whether a module tree has other submodules or parameters than before, or stores these elsewhere."""

    def __init__(self, root: nn.Module, values: bool = False):
        """values=True notices edits of the numbers, too; for those who hold copies of them."""
        tables: list[dict] = []
        for module in root.modules():
            tables += [module._modules, module._parameters, module._buffers]
        self._tables = [table for table in tables for _ in table]
        self._keys = [key for table in tables for key in table]
        self._entries = [table[key] for table in tables for key in table]
        self._children = [module._modules for module in root.modules() if module._modules]
        self._tensors = [entry for entry in self._entries if isinstance(entry, Tensor)]
        self._versioned = [tensor for tensor in self._tensors if values and not tensor.is_inference()]
        self._held = [tensor.detach() for tensor in self._versioned]  # so that no new storage gets an old one's address
        self._snapshot = self._read()

    def matches(self) -> bool:
        same_entries = all(map(is_, map(dict.get, self._tables, self._keys), self._entries))
        return same_entries and self._read() == self._snapshot

    def _read(self) -> tuple[list, ...]:
        return (
            list(map(len, self._children)),
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(attrgetter("dtype"), self._tensors)),
            list(map(attrgetter("_version"), self._versioned)),
        )
