"""The house's one rule: imports run one way. `models` speaks tensors, `nanovlm` pictures and words, `eval` measures."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_is_read_in_one_sitting(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 320
    assert ast.get_docstring(ast.parse(text)), "the first line says what the file is"
    assert not re.search(r"util|helper|common|manager|handler", file.name.lower())


def test_the_doors_are_doors():
    for door in ("generate.py", "train.py"):
        assert len((ROOT / door).read_text(encoding="utf-8").splitlines()) <= 15
        assert set(imported(ROOT / door)) <= {"sys", "nanovlm"}
