"""The machine's name and limits."""

import torch

from eval.lib.cpu_levels import current_level
from eval.lib.hardware import environment, matmul_flops, memory_bandwidth


def test_limits_are_plausible():
    assert 1e8 < memory_bandwidth(2**24) < 1e13
    assert all(1e7 < matmul_flops(dtype, 256) < 1e15 for dtype in (torch.float32, torch.int8))


def test_the_environment_is_one_line():
    line = environment("cpu", torch.bfloat16)
    assert f"torch {torch.__version__}" in line and f"{torch.get_num_threads()} threads" in line
    assert f"level {current_level()}" in line and "level avx2 vnni" in environment(levels=["avx2", "vnni"])
    assert "torch.bfloat16" in line and "\n" not in line and not line.startswith(",")
