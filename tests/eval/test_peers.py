"""The checks of other engines, in a process of their own: with theirs loaded, tests/test_docs.py ended in a crash."""

import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT


@pytest.mark.full
def test_engines_compute_what_the_plain_model_computes():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "full", str(Path(__file__).with_name("peer_checks.py"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
