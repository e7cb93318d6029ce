"""`import nanovlm`: what it exports, and what it says when another package is in the way."""

import subprocess
import sys

import pytest

import nanovlm
from support import ROOT


@pytest.mark.parametrize("file", ["__init__.py", "notes.txt"])
def test_foreign_models_package_is_one_sentence_with_the_way_out(tmp_path, file):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / file).write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; sys.path.append({str(ROOT)!r}); import nanovlm"
    if file == "notes.txt":  # a namespace package loses against a real one, wherever that is
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
        return
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    message = run.stderr.splitlines()[-1]
    assert run.returncode == 1 and message.startswith("ImportError: nanovlm needs its own package `models`")
    assert str(tmp_path / "models") in message and "run from another directory" in message


def test_exports_are_loaded_on_first_use():
    assert {getattr(nanovlm, name) for name in nanovlm.__all__ if name[0].isupper() and not name.isupper()}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nobody"):
        nanovlm.nobody  # noqa: B018
