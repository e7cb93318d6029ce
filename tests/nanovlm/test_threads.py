"""A wrong number of threads, forks, and a busy machine; memory that is kept."""

import platform
import subprocess
import sys

import pytest

from nanovlm.cli import main as cli
from nanovlm.device import MEASURED_CALLS, BusyMonitor
from support import ROOT


@pytest.mark.parametrize("verb", [["evaluate", "--data", "scenes"], ["train", "--data", "scenes", "--out", "x"]])
def test_a_wrong_number_is_one_line(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*verb, "--threads", "0"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("--threads 0 must be at least 1 and at most 1024")


@pytest.mark.parametrize(
    ("threads", "cpu_s", "busy"), [(2, 2.0, False), (2, 1.5, False), (2, 0.9, True), (1, 0.1, False), (4, 2.0, True)]
)
def test_threads_that_wait_for_cores_are_named_once(threads, cpu_s, busy):
    """Each stretch takes a second, the first one, which does not count, a hundred."""
    now, cpu = [0.0], [0.0]
    monitor = BusyMonitor(threads, lambda: now[0], lambda: cpu[0])
    notes = []
    for i in range(20):
        with monitor.measure():
            now[0] += 1 if i else 100
            cpu[0] += cpu_s
        notes.append(monitor.note())
    assert [i + 1 for i, note in enumerate(notes) if note] == [MEASURED_CALLS] * busy
    assert not busy or "--threads 1" in notes[MEASURED_CALLS - 1]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_kept():
    """Tensors that are made and freed again cost new pages, unless the process keeps them."""
    program = """
import resource, sys, torch
from nanovlm.device import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"""
    commands = ([sys.executable, "-c", program, name] for name in ("kept", "returned"))
    kept, returned = (int(subprocess.check_output(command, cwd=ROOT)) for command in commands)
    assert 4 * kept < returned
