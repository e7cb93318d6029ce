"""How many threads PyTorch uses on the CPU: as many as this process may really have.

os.cpu_count() counts the machine's cores, which a container or `taskset` may not grant. On a busy machine one thread
can be many times faster than two: OpenMP's threads wait for each other at every operation, and one that is not
scheduled holds up all.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nanovlm.device import available_cores
from nanovlm.errors import UsageError

CGROUP = Path("/sys/fs/cgroup")
MIN_CPU_SHARE = 0.7  # CPU time over wall time of a thread below which the machine is called busy
MEASURED_CALLS = 6


def cgroup_quota(root: Path = CGROUP) -> float | None:
    """The CPU cores that the control group grants (version 2, then 1), or None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        cores = float(quota) / float(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return cores if cores > 0 else None  # -1: no limit


def available_threads(root: Path = CGROUP) -> int:
    """OMP_NUM_THREADS if it is set, else the cores that affinity and the control group's quota allow, at least 1."""
    requested = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if requested.isdecimal() and int(requested) > 0:
        return int(requested)
    quota = cgroup_quota(root)
    cores = available_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def set_threads(text: str) -> int:
    """Make PyTorch use `text` threads, a number or auto for no more than are available; returns the number."""
    import torch

    if text != "auto" and not (text.isdecimal() and 0 < int(text) <= 1024):
        raise UsageError(f"--threads {text} is neither auto nor a number from 1 to 1024")
    # auto never raises PyTorch's own choice, the physical cores
    threads = min(torch.get_num_threads(), available_threads()) if text == "auto" else int(text)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads


class BusyMonitor:
    """Notices that the threads of a computation wait for cores that other processes use.

    `clock` returns seconds, and `cpu_clock` the CPU seconds of all threads of this process.
    """

    def __init__(
        self,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ):
        self.threads, self.clock, self.cpu_clock = threads, clock, cpu_clock
        self.calls, self.wall_s, self.cpu_s = 0, 0.0, 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure a stretch of computation for all threads; the first one, which warms up, is ignored."""
        wall, cpu = self.clock(), self.cpu_clock()
        yield
        if self.calls:
            self.wall_s += self.clock() - wall
            self.cpu_s += self.cpu_clock() - cpu
        self.calls += 1

    def note(self) -> str | None:
        """After MEASURED_CALLS stretches, and only then: a line that names --threads 1 if the machine is busy."""
        if self.calls != MEASURED_CALLS or self.threads == 1 or self.wall_s <= 0:
            return None
        share = self.cpu_s / (self.wall_s * self.threads)
        if share > MIN_CPU_SHARE:
            return None
        return (
            f"note: the {self.threads} threads ran only {share:.0%} of the time, as other processes use the cores; "
            "--threads 1 may be many times faster"
        )
