"""The messages of errors, read from the source: those of wrong use and bad data say what to do."""

import ast
import re

import pytest

from support import ROOT

# Wrong use, bad data and missing packages: the user can do something about each. A damaged file of a model is named.
DATA_KINDS = ("DataError", "ExampleError")
KINDS = ("UsageError", *DATA_KINDS, "TrainingError", "MissingExtraError", "OutputError")
WAY_OUT = re.compile(
    r"; |, or |pip install|\b(must|needs?|has no effect|exclude|omit|name|take|show|ask|send|use|try|raise|lower)\b|"
    r"is none of|is less than|not (like|a|an|one)\b|no (range|share|origin|folder)\b"
)


def messages():
    """Place and text of each message that a raised error begins, {} for each value in it."""
    for path in sorted([*ROOT.glob("models/**/*.py"), *ROOT.glob("nanovlm/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in KINDS and node.args:
                parts = getattr(node.args[0], "values", [node.args[0]])
                if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
                    text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
                    yield pytest.param(text, id=f"{path.relative_to(ROOT)}:{node.lineno}")


@pytest.mark.parametrize("text", list(messages()))
def test_a_message_says_what_to_do(text):
    assert not text.endswith((".", "!")) and "  " not in text and not re.search(r"\b(failed|invalid|illegal)$", text)
    is_another_error = re.fullmatch(r"[\w/:{} -]*\{\}", text)  # which names its own way out
    assert is_another_error or WAY_OUT.search(text), f"no way out: {text}"
