"""What this machine can do at most: the two limits of every stage (Williams et al. 2009, "Roofline")."""

import time
from collections.abc import Callable
from functools import cache

import torch


def fastest(function: Callable[[], object], rounds: int = 9) -> float:
    """The seconds that a call takes when nothing disturbs it."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


@cache
def bytes_per_s(size: int = 2**29) -> float:
    """How fast all threads together read memory that is in no cache."""
    numbers = torch.ones(size // 4)
    return size / fastest(numbers.amax)


@cache
def flops_per_s(dtype: torch.dtype, n: int = 2048) -> float:
    """How many floating-point operations a second a product of matrices does, as F.linear has it."""
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    with torch.inference_mode():
        return 2 * n**3 / fastest(lambda: torch.nn.functional.linear(a, b))
