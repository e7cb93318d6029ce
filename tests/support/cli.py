"""Running the command line, in this process or another."""

import io
import os
import subprocess
import sys

from support import ROOT

FAST_FLAGS = ["--max-new-tokens", "6", "--dtype", "float32", "--device", "cpu"]


def run_program(*argv, program="generate.py", **options):
    """Run a root script in a process of its own, on one thread; options are those of `subprocess.run`."""
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "stdout": subprocess.PIPE, **options}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"} | options.pop("env", {})
    return subprocess.run([sys.executable, ROOT / program, *argv], env=environment, timeout=120, **options)


def set_stream(name, stream, monkeypatch):
    monkeypatch.setattr(sys, name, stream)
    return stream


def set_stdin(data, monkeypatch):
    set_stream("stdin", io.TextIOWrapper(io.BytesIO(data)), monkeypatch)


def assert_usage_error(result, *words, program="generate.py"):
    """Check for exit code 2, nothing on stdout, and one line on stderr with the program's name and all of the words."""
    code, out, err = result
    assert (code, out) == (2, "") and err.startswith(f"{program}: ") and len(err.splitlines()) == 1, err
    for word in words:
        assert word in err


class FakeTerminal(io.StringIO):
    """A standard output that claims to be a terminal; `shown` is its text at each flush."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def isatty(self):
        return True

    def reconfigure(self, **options):
        pass

    def flush(self):
        self.shown.append(self.getvalue())


IMAGE_NAMES = ["a.png", "b two.jpg", "deep/ünï-🙂.png", "deep/er/c.webp", "d.gif"]
