"""Running the command line in this process or another."""

import io
import os
import subprocess
import sys

from support import ROOT

SHORT = ["--max-new-tokens", "6", "--dtype", "float32", "--device", "cpu"]


def user_runs(*argv, program="generate.py", **options):
    """A program in a process of its own."""
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "stdout": subprocess.PIPE, **options}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"} | options.pop("env", {})
    return subprocess.run([sys.executable, ROOT / program, *argv], env=environment, timeout=120, **options)


def stdin_of(data, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def refused(result, *words, program="generate.py"):
    """Exit 2, nothing on stdout, and one line on stderr that says who speaks and all the words."""
    code, out, err = result
    assert (code, out) == (2, "") and err.startswith(f"{program}: ") and len(err.splitlines()) == 1, err
    for word in words:
        assert word in err


class Terminal(io.StringIO):
    """Remembers what was shown, and when."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def isatty(self):
        return True

    def reconfigure(self, **options):
        pass

    def flush(self):
        self.shown.append(self.getvalue())


def read_or_end(file):
    try:
        return os.read(file, 4096)
    except OSError:  # how Linux says that nobody is left at the other end
        return b""


NAMES = ["a.png", "b two.jpg", "deep/ünï-🙂.png", "deep/er/c.webp", "d.gif"]
