"""Interleaved timing: contestants take turns in every round, so that a busy machine slows all of them alike."""

import time
from collections.abc import Callable, Mapping

import torch

CPU = torch.device("cpu")


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
) -> dict[str, list[float]]:
    """Call every contestant once per round, after `warmup` rounds that do not count; the seconds of each round.

    A contestant returns the seconds it took, so that it can prepare each call untimed (see `measure_seconds`).
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(1 - warmup, rounds + 1):
        for name, run in contestants.items():
            elapsed = run()
            if turn > 0:
                seconds[name].append(elapsed)
                log(f"round {turn}/{rounds}: {name}, {elapsed:.3f} s")
    return seconds
