"""The machine a figure was measured on: its name, and its two speed limits (Williams et al. 2009, "Roofline")."""

import time
from collections.abc import Callable
from functools import cache

import torch

from models.inference.kernels.load import cpu_info


def environment(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """One line: processor, threads, torch version, precision, device."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{cpu_info('model name')}, {torch.get_num_threads()} threads, torch {torch.__version__}, {dtype}, {name}"


@cache
def memory_bandwidth(size: int = 2**29) -> float:
    """Bytes per second at which all threads together read `size` bytes that are in no cache."""
    tensor = torch.ones(size // 4)
    return size / _fastest(tensor.amax)


@cache
def matmul_flops(dtype: torch.dtype, n: int = 2048) -> float:
    """Operations per second of an n x n matrix product: F.linear, or of int8 with sums in int32."""
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    product = torch._int_mm if dtype == torch.int8 else torch.nn.functional.linear
    with torch.inference_mode():
        return 2 * n**3 / _fastest(lambda: product(a, b))


def _fastest(function: Callable[[], object], rounds: int = 9) -> float:
    """Seconds of the fastest of several calls: the speed without interference from other programs."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
