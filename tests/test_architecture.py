"""The rules of docs/architecture.md: imports run one way, without circles, the core knows no add-on, and nothing grows.

`python tests/test_architecture.py` prints that page's table of budgets with the lines of now.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from support import ROOT
from support.import_graph import PACKAGES, SCRIPTS, ImportGraph

GRAPH = ImportGraph(ROOT)
MAINTAINED = {".py", ".c", ".h", ".html", ".css", ".js"}  # endings of the files whose lines count
SUM, TESTS = "sum", "`tests/`"  # rows of the table of budgets

FORBIDDEN = {  # packages that the modules of a package must not import
    "models": {"nanovlm", "eval", "tests", "PIL", "torchvision", "tokenizers", "jinja2", "transformers", "numpy"},
    "nanovlm": {"eval", "tests", "torchvision", "transformers", "numpy"},
    "eval": {"tests", *(script.removesuffix(".py") for script in SCRIPTS)},
}
AUGMENTATION = ("nanovlm.processing", "nanovlm.training")  # may use torchvision, inside functions
CORE = {
    "models.config", "models.errors", "models.cache", "models.attention", "models.language_model",
    "models.vision_transformer", "models.modality_projector", "models.vision_language_model", "models.decoding",
    "models.files",
    "models.checkpoint",
}  # fmt: skip
ADD_ONS = ("models.inference", "models.kv_study", "models.lora", "models.mingpt", "models.formats")


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def edges() -> Iterator[tuple[str, str]]:
    return ((module, target) for module, targets in GRAPH.edges.items() for target in targets)


def test_the_graph_sees_imports_inside_functions_and_circles(tmp_path):
    (tmp_path / "models").mkdir()
    sources = {"a": "def f():\n    importlib.import_module('models.b')\n", "b": "from .a import f\n"}
    for name, source in sources.items():
        (tmp_path / f"models/{name}.py").write_text(source)
    for name in SCRIPTS:
        (tmp_path / name).touch()
    assert set(ImportGraph(tmp_path).circle) == {"models.a", "models.b"}


def test_there_are_no_import_circles():
    assert not GRAPH.circle


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_only_those_below_them(package):
    assert not {
        f"{module} imports {item.module}"
        for module, imports in GRAPH.imports.items()
        if within(module, package)
        for item in imports
        if item.module.partition(".")[0] in FORBIDDEN[package]
        and not (item.module.startswith("torchvision") and within(module, *AUGMENTATION))
    }


def test_torchvision_is_imported_where_it_is_used_and_not_with_a_module():
    """Its import takes two seconds, which `--help` and captions do not wait for."""
    for module, path in GRAPH.files.items():
        if within(module, *AUGMENTATION):
            body = ast.parse(path.read_text(encoding="utf-8")).body
            top = [node for node in body if not isinstance(node, ast.FunctionDef)]
            assert "torchvision" not in {name for node in top for name in identifiers(node)}, module


def test_only_entry_points_and_eval_import_the_command_line():
    importers = {module for module, target in edges() if within(target, "nanovlm.cli")}
    assert not {m for m in importers if not within(m, "nanovlm.cli", "nanovlm.__main__", "eval", "generate", "train")}


def test_the_core_imports_no_add_on():
    assert not {(module, target) for module, target in edges() if module in CORE and within(target, *ADD_ONS)}


def test_the_core_is_complete():
    """Every module directly in models/ is either core or an add-on."""
    assert {m for m in GRAPH.files if m.startswith("models.") and not within(m, *ADD_ONS)} == CORE


def test_mingpt_stands_alone():
    """The reader of GPT-2's weights needs the core's reader of files, and nothing else of this project."""
    foreign = {target for module, target in edges() if within(module, "models.mingpt")}
    assert {target for target in foreign if not within(target, "models.mingpt")} == {
        "models.checkpoint",
        "models.errors",
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_root_scripts_only_call_the_command_line(script):
    assert {item.module for item in GRAPH.imports[script.removesuffix(".py")]} <= {"sys", "nanovlm.cli.main"}


def test_no_module_imports_a_private_name_of_another():
    assert not {
        f"{module} imports {item.module}.{item.name}"
        for module, imports in GRAPH.imports.items()
        for item in imports
        if item.module.partition(".")[0] in FORBIDDEN
        and (item.name or "").startswith("_")
        and item.name != "__version__"
    }


def identifiers(tree: ast.AST) -> Iterator[str]:
    """All names in a source file: variables, attributes, parameters, functions, classes and imports."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield from value.split(".")


def budget_rows() -> list[list[str]]:
    """The table of budgets in docs/architecture.md: package, budget, now, what is in it."""
    lines = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if re.match(r"\| .+ \| [\d,]+ \| [\d,]+ \|", line)]
    return [[cell.strip() for cell in row] for row in rows]


def count_lines(packages: list[str]) -> dict[str, int]:
    """The lines of each package now; a file counts for the longest path in backticks that its own begins with."""
    owners = {path.removesuffix("*.py"): package for package in packages for path in re.findall("`(.+?)`", package)}
    lines = dict.fromkeys(packages, 0)
    for file in (file for folder in (*PACKAGES, "tests") for file in (ROOT / folder).rglob("*")):
        if file.suffix in MAINTAINED:
            name = file.relative_to(ROOT).as_posix()
            owner = max((path for path in owners if name.startswith(path)), key=len)
            lines[owners[owner]] += len(file.read_text(encoding="utf-8").splitlines())
    return lines | {SUM: sum(lines.values()) - lines[TESTS]}


def test_no_package_has_more_lines_than_its_row_of_the_table_says():
    limits = {package: int(now.replace(",", "")) for package, _, now, _ in budget_rows()}
    lines = count_lines([*limits])
    assert not {name: f"{lines[name]:,} of {limit:,}" for name, limit in limits.items() if lines[name] > limit}


if __name__ == "__main__":  # print the table's rows with the lines of now
    table = budget_rows()
    lines = count_lines([package for package, *_ in table])
    for package, budget, _, content in table:
        print(f"| {package} | {budget} | {lines[package]:,} | {content} |")
