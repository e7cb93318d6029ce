"""What this machine can do at most: the two limits of every stage (Williams et al. 2009, "Roofline")."""

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch


def seconds(function: Callable[[], object], rounds: int = 7) -> float:
    """The median time that a call takes, after one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


@cache
def bytes_per_s(size: int = 2**30) -> float:
    """How fast all threads together read memory that is in no cache."""
    numbers = torch.ones(size // 8, dtype=torch.int64)
    return size / seconds(numbers.sum)


@cache
def flops_per_s(dtype: torch.dtype, n: int = 2048) -> float:
    """How many floating-point operations a product of matrices does, as F.linear has it."""
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    return 2 * n**3 / seconds(lambda: torch.nn.functional.linear(a, b))
