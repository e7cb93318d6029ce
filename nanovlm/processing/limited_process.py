"""Limited processes, which run programs and decoders that a stranger's file may turn against us.

Python's isolated mode keeps the current folder, PYTHONPATH and PYTHONSTARTUP from what a child imports. Its environment
holds no key of ours. Its CPU time and memory are limited; where Python has no `resource`, as on Windows, and on systems
that refuse these limits, as macOS does for memory, only the time on the clock is.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from models import imported
from nanovlm.errors import NanoVLMError, first_line

ROOT = str(Path(__file__).parents[2])
PROGRAM = f"import sys; sys.path[:0] = [{ROOT!r}]; sys.path += sys.argv[4:]; from {__name__} import main; main()"
ENVIRONMENT = ("DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
CLOCK_FACTOR = 10  # seconds on the clock for each of CPU time: other programs may be busy
OUT_OF_MEMORY = 112  # exit status


class LimitedError(NanoVLMError):
    """A function that failed in its limited process, or a process that has ended; the message says why."""


class LimitedProcess:
    """A child process that calls one function, named module:name; it starts with the first call, and after an end."""

    def __init__(self, function: str, seconds: int, n_bytes: int):
        self.function = function
        self.seconds = seconds  # of CPU, for each call
        self.n_bytes = n_bytes  # of address space
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, *arguments: Any) -> tuple[Any, bytes]:
        """The value, JSON like the arguments, and the bytes that the function returns. Thread-safe. LimitedError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            process = self._process
            assert process.stdin is not None and process.stdout is not None  # pipes
            start = time.monotonic()
            clock = threading.Timer(CLOCK_FACTOR * self.seconds, process.kill)
            clock.start()
            reply: dict[str, Any] = {}
            data = b""
            is_whole = False
            try:
                with suppress(OSError, ValueError):  # it has ended
                    process.stdin.write(json.dumps(arguments).encode() + b"\n")
                    process.stdin.flush()
                    reply = json.loads(process.stdout.readline())
                    data = process.stdout.read(reply["n_bytes"])
                    is_whole = len(data) == reply["n_bytes"]
            finally:  # the rest of an answer that an interrupt left is not that of the next call
                clock.cancel()
                if not is_whole:
                    self.close()
        if not is_whole:
            is_late = time.monotonic() - start >= CLOCK_FACTOR * self.seconds
            raise LimitedError(self._why_ended(process.returncode, is_late))
        if error := reply.get("error"):
            raise LimitedError(error)
        return reply["value"], data

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _end(self._process)
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        here = os.path.realpath("")
        paths = [path for path in sys.path if os.path.realpath(path) != here]  # as of --user and of PYTHONPATH
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", PROGRAM, self.function, str(self.seconds), str(self.n_bytes), *paths],
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        return process

    def _why_ended(self, status: int, is_late: bool) -> str:
        if is_late or status == -getattr(signal, "SIGXCPU", 0):
            return f"it took more than {self.seconds} s"
        if status == OUT_OF_MEMORY:
            return f"it took more than {self.n_bytes >> 20} MiB"
        how = f"exit status {status}" if status >= 0 else f"signal {-status} ({signal.strsignal(-status)})"
        return f"its process ended with {how}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(OSError), process:  # closes the pipes and waits; there may be bytes for a process that has ended
        pass


def main() -> None:
    """Read arguments, a line of JSON for each call; write a line and bytes for each."""
    function, seconds, n_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal
    _limit("RLIMIT_AS", n_bytes)
    _limit("RLIMIT_CPU", seconds)
    for line in sys.stdin.buffer:
        _limit("RLIMIT_CPU", int(time.process_time()) + 1 + seconds)
        chunks: Iterable[bytes] = ()
        try:
            value, chunks = imported(function)(*json.loads(line))
            reply = {"value": value, "n_bytes": sum(map(len, chunks))}
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            reply = {"error": getattr(error, "strerror", None) or first_line(error), "n_bytes": 0}
            if not isinstance(error, NanoVLMError | OSError | ValueError):
                reply["error"] = f"{type(error).__name__}: {reply['error']}"
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.writelines(chunks)
        sys.stdout.buffer.flush()


def _limit(kind: str, amount: int) -> None:
    """Limit a resource of this process, if the system knows it and allows more."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        number = getattr(resource, kind)
        resource.setrlimit(number, (amount, resource.getrlimit(number)[1]))
