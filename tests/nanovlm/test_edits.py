"""An edit of the core counts in captions, folders, choices and training, as a patch and in the files."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from models.inference.inference_model import PlainNetwork
from support import ROOT
from support.edits import EDITS, IMAGES, check_doors, load, report

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def unedited():
    return report()


def differs(found, unedited) -> bool:
    pairs = zip(found["answers"], unedited["answers"])
    scores = [(a, b) for (_, new), (_, old) in pairs for a, b in zip(new, old)]
    return any(abs(a - b) > 0.05 for a, b in [*scores, (found["loss"], unedited["loss"])])


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_counts_as_a_patch(unedited, monkeypatch, name):
    edit = EDITS[name]
    edit.patch(monkeypatch)
    found = report()
    assert differs(found, unedited)
    assert not edit.changes_training or abs(found["loss"] - unedited["loss"]) > 1e-3
    for quantize in ("int8", "int4"):
        check_doors(captioner := load(quantize), IMAGES[:1])
        assert type(captioner.inference.network) is PlainNetwork
    monkeypatch.undo()
    loaded = load()
    before = loaded.inference.network
    edit.patch(monkeypatch)
    if not edit.when_made:
        assert check_doors(loaded, IMAGES) == found["answers"]
    assert type(before) is not type(loaded.inference.network) is PlainNetwork


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_counts_in_the_files(unedited, tmp_path, name):
    edit = EDITS[name]
    for package in ("models", "nanovlm", "tests/support"):
        target = tmp_path / package.removeprefix("tests/")
        shutil.copytree(ROOT / package, target, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / f"models/{edit.file}.py"
    path.write_text(edit.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.edits"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert differs(json.loads(done.stdout), unedited)
    assert f"models/{edit.file}.py is edited or patched" in done.stderr
