"""One deadline for every test: what waits without an end fails, with its stack, and its processes end with it."""

import faulthandler
import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

SECONDS = int(os.environ.get("NANOVLM_TEST_SECONDS", 240))  # of setup, of the test and of its end, each
TIERS = {"full": 2, "slow": 5}  # times as long for the tests of a tier
AGAIN = 30  # seconds until the end of a test that hangs in its own cleaning up is interrupted, too


def descendants():
    """Process ids of this process's children, and of theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


@contextmanager
def limited(item):
    """Fail after the deadline of this test, a pytest item, by the alarm signal."""
    if not hasattr(signal, "SIGALRM"):  # on Windows faulthandler_timeout of pyproject.toml ends the run
        yield
        return
    seconds = SECONDS * max((n for tier, n in TIERS.items() if item.get_closest_marker(tier)), default=1)

    def expire(number, frame):
        faulthandler.dump_traceback(file=2)  # of all threads
        for pid in descendants():  # or a `with Popen(...)` would wait for them
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail(f"no end after {seconds} s; the stacks of all threads are in the captured standard error")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
