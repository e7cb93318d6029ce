"""Interleaved timing: contestants take turns in every round, so that a busy machine slows all of them alike."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Timing:
    """Seconds of each round of one contestant."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on an accelerator has finished; a CPU queues none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_seconds(function: Callable[[], object], device: torch.device = CPU) -> float:
    """Seconds of one call, work queued on the device included."""
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def interleave(
    contestants: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int = 1,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Timing]:
    """Call every contestant once per round, after `warmup` calls that do not count.

    A contestant returns the seconds it took, so that it can prepare each call untimed (see `measure_seconds`).
    """
    for _ in range(warmup):
        for run in contestants.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(1, rounds + 1):
        for name, run in contestants.items():
            seconds[name].append(run())
            log(f"round {turn}/{rounds}: {name}, {seconds[name][-1]:.3f} s")
    return {name: Timing(values) for name, values in seconds.items()}


@contextmanager
def competing_processes(n: int) -> Iterator[list[subprocess.Popen]]:
    """Keep n other processes busy on the cores that this process may use."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
