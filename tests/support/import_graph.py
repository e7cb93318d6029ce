"""The import graph of models, nanovlm and eval, read from the source without importing it.

Imports inside functions count, and so do those by name at run time: of `import_module(f"package.{name}")`, all modules
of the package, and of a text like "models.config:VLMConfig" this module. Imports under `if TYPE_CHECKING:` count only
in an `__init__.py`, where they are the names that the package loads on first use.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("models", "nanovlm", "eval")
SCRIPTS = ("generate.py", "train.py")


class Import(NamedTuple):
    """`import module`, or `from module import name`."""

    module: str
    name: str | None = None


class ImportGraph:
    """Modules of a source tree: their files, all their imports, and the modules of the tree that each of them names."""

    def __init__(self, root: Path):
        files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
        self.files = {
            ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
            for path in [*files, *(root / script for script in SCRIPTS)]
        }
        self.imports = {module: set(imports_of(module, path)) for module, path in self.files.items()}
        for imports in self.imports.values():
            for item in [item for item in imports if item.module.endswith(".")]:
                imports.remove(item)
                imports |= {Import(name) for name in self.files if name.startswith(item.module)}
        self.edges = {
            module: {self._target(item) for item in imports} - {None, module}
            for module, imports in self.imports.items()
        }

    def _target(self, item: Import) -> str | None:
        submodule = f"{item.module}.{item.name}"
        return submodule if submodule in self.files else item.module if item.module in self.files else None

    @property
    def circle(self) -> list[str]:
        """The modules of a circle of imports, if there is one."""
        try:
            TopologicalSorter(self.edges).prepare()
        except CycleError as error:
            return error.args[1]
        return []


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """All imports in a file, wherever they stand, except those for type checking only."""
    is_package = path.name == "__init__.py"
    package = module.split(".") if is_package else module.split(".")[:-1]
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
            parents = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (Import(source, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and "import" in ast.unparse(node.func):
            name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(name.value)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(models|nanovlm)[.\w]*:\w+", str(node.value)):
            yield Import(*node.value.split(":"))
