"""The house's one rule: imports run one way. `models` speaks tensors, `nanovlm` pictures and words, `eval` measures."""

import ast

import pytest

from support import ROOT

FILES = sorted(path.relative_to(ROOT) for room in ("models", "nanovlm") for path in (ROOT / room).rglob("*.py"))
FORBIDDEN = {
    "models": {"nanovlm", "eval", "tests", "PIL", "torchvision", "tokenizers", "jinja2", "transformers", "numpy"},
    "nanovlm": {"eval", "tests", "torchvision", "transformers", "numpy"},
}


def imported(path):
    """The packages a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_run_one_way(file):
    assert not set(imported(ROOT / file)) & FORBIDDEN[file.parts[0]]


def test_the_doors_are_doors():
    for door in ("generate.py", "train.py"):
        assert set(imported(ROOT / door)) <= {"sys", "nanovlm"}
