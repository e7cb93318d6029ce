"""The machine that a figure is measured on: its CPU levels, its name in a line, its speed limits, timing in turns."""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from models.inference.kernels.load import FOR_TESTS, available_levels, chosen_level, cpu_info, load_library

LEVEL = "NANOVLM_CPU_LEVEL"
PACKAGES = {"llama_cpp": "llama-cpp-python", "openvino": "openvino"}  # named in `environment` once imported
CPU = torch.device("cpu")


def levels_here() -> list[str]:
    """The kernels' levels on this CPU, lowest first; empty where there are no kernels or no compiler."""
    levels = [level for level in available_levels() if level not in FOR_TESTS]
    return levels if levels and load_library(levels[-1]) is not None else []


def current_level() -> str:
    """The level of an InferenceModel made now; "none" is PyTorch's own operations."""
    level = chosen_level()
    return level if level is not None and load_library(level) is not None else "none"


def at_level(level: str) -> AbstractContextManager[Any]:
    """Make InferenceModels at a level, or with "none" of plain modules."""
    return patch.dict(os.environ, {LEVEL: level})


def cpu_name() -> str:
    """The processor's model name, or where that is unknown its architecture."""
    return cpu_info("model name") or platform.machine()


def environment(
    device: str | torch.device = "cpu", dtype: torch.dtype | None = None, levels: Sequence[str] = ()
) -> str:
    """One line: processor, levels of its instructions, threads, versions of loaded engines, precision, device."""
    device = torch.device(device)
    parts = [cpu_name(), f"level {' '.join(levels or [current_level()])}", f"{torch.get_num_threads()} threads"]
    parts += [f"torch {torch.__version__}"]
    parts += [f"{package} {version(package)}" for module, package in PACKAGES.items() if module in sys.modules]
    parts += [str(dtype)] if dtype else []
    return ", ".join([*parts, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type])


@cache
def memory_bandwidth(size: int = 2**29) -> float:
    """Bytes per second at which all threads together read `size` bytes that are in no cache."""
    tensor = torch.ones(size // 4)
    return size / _fastest(tensor.amax)


@cache
def matmul_flops(dtype: torch.dtype, n: int = 2048) -> float:
    """Operations per second of an n x n matmul by PyTorch, in dtype or, where that is faster, in float32."""
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    matmuls = [partial(torch._int_mm if dtype == torch.int8 else linear, a, b)]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        matmuls.append(partial(linear, a.to_mkldnn(), b.to_mkldnn()))  # oneDNN; MKL is slow on AMD's processors
    with torch.inference_mode():
        flops = 2 * n**3 / min(map(_fastest, matmuls))
    return flops if dtype == torch.float32 else max(flops, matmul_flops(torch.float32, n))


def _fastest(function: Callable[[], object], rounds: int = 9) -> float:
    """Seconds of the fastest of several calls within a second: the speed without interference from other programs."""
    seconds: list[float] = []
    while len(seconds) < rounds and sum(seconds) < 1:
        seconds.append(measure_seconds(function))
    return min(seconds)


@contextmanager
def count_flops() -> Iterator[FlopCounterMode]:
    """Count the operations of matmuls and attention, as PyTorch does.

    Within the context attention is computed by matmuls: torch 2.14 does not count its fused form on a CPU.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


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

    A busy machine so slows all alike. A contestant returns the seconds it took, so that it can prepare untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(1 - warmup, rounds + 1):
        for name, run in contestants.items():
            elapsed = run()
            if turn > 0:
                seconds[name].append(elapsed)
                log(f"round {turn}/{rounds}: {name}, {elapsed:.3f} s")
    return seconds
