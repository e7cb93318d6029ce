"""The import graph of models, nanovlm and eval, read from the source without importing it.

Imports inside functions count. Imports under `if TYPE_CHECKING:` count
only in an `__init__.py`, where they are the names that the package loads on first use.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGES = ("models", "nanovlm", "eval")
SCRIPTS = ("generate.py", "train.py")


@dataclass(frozen=True)
class Import:
    """`import module`, or `from module import name`."""

    module: str
    name: str | None = None


class ImportGraph:
    """Modules of a source tree and which of them import which others."""

    def __init__(self, root: Path):
        files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
        files += [root / script for script in SCRIPTS]
        self.files = {module_name(path.relative_to(root)): path for path in files}

    @cached_property
    def imports(self) -> dict[str, set[Import]]:
        """All imports of each module, also those of other projects."""
        return {module: set(imports_of(module, path)) for module, path in self.files.items()}

    @cached_property
    def edges(self) -> dict[str, set[str]]:
        """The modules of this tree that each module imports by name."""
        edges = {}
        for module, imports in self.imports.items():
            targets = {self._target(item) for item in imports} - {None, module}
            edges[module] = {target for target in targets if target is not None}
        return edges

    def _target(self, item: Import) -> str | None:
        submodule = f"{item.module}.{item.name}"
        if submodule in self.files:
            return submodule
        return item.module if item.module in self.files else None

    @property
    def circle(self) -> list[str]:
        """The modules of a circle of imports, if there is one."""
        try:
            TopologicalSorter(self.edges).prepare()
        except CycleError as error:
            return error.args[1]
        return []


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """All imports in a file, wherever they stand, except those for type checking only."""
    is_package = path.name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if not is_package and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes.extend(node.orelse)
            continue
        nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (Import(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (Import(source, alias.name) for alias in node.names)
