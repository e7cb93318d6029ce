"""The machine's name and limits, and the costs of stages, which are those that theory gives."""

from dataclasses import replace

import pytest
import torch

from eval.lib.cpu_levels import current_level
from eval.lib.hardware import StageCost, environment, matmul_flops, memory_bandwidth, stage_costs
from eval.lib.shapes import SHAPES

CFG = replace(
    SHAPES["230M"][0], vit_img_size=64, vit_hidden_dim=32, vit_inter_dim=48, vit_n_heads=2, vit_n_blocks=2,
    lm_hidden_dim=48, lm_inter_dim=64, lm_n_heads=6, lm_n_kv_heads=2, lm_n_blocks=2, lm_vocab_size=500,
    mp_pixel_shuffle_factor=2, mp_image_token_length=4,
)  # fmt: skip


def test_limits_are_plausible():
    assert 1e8 < memory_bandwidth(2**24) < 1e13
    assert all(1e7 < matmul_flops(dtype, 256) < 1e15 for dtype in (torch.float32, torch.int8))


def test_the_environment_is_one_line():
    line = environment("cpu", torch.bfloat16)
    assert f"torch {torch.__version__}" in line and f"{torch.get_num_threads()} threads" in line
    assert f"level {current_level()}" in line and "level avx2 vnni" in environment(levels=["avx2", "vnni"])
    assert "torch.bfloat16" in line and "\n" not in line and not line.startswith(",")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_weights_and_operations_are_the_models(batch_size):
    costs = stage_costs(CFG, prompt_tokens=20, batch_size=batch_size)
    assert list(costs) == ["encode", "prefill", "decode"]
    block = 48 * (48 + 2 * 16 + 48) + 3 * 48 * 64
    weights = 2 * (block + 2 * 48) + 48 + 500 * 48  # the head is the embedding
    assert costs["prefill"].weights == costs["decode"].weights == weights and costs["encode"].weights > 0
    products = 2 * (2 * block * 20 + 500 * 48)  # two operations per weight and token; the head once
    attention = 2 * 4 * 20 * (20 + 1) * 48
    assert batch_size * products < costs["prefill"].flops <= batch_size * (products + attention)
    decode = 2 * (2 * block + 500 * 48) + 2 * 4 * 21 * 48
    assert costs["decode"].flops == pytest.approx(batch_size * decode)


def test_the_limit_is_the_longer_of_reading_and_computing():
    cost = StageCost(weights=20, flops=60)
    assert cost.roofline_s(4, bytes_per_s=10.0, flops_per_s=2.0) == 60 / 2
    assert cost.roofline_s(2, bytes_per_s=10.0, flops_per_s=100.0) == 20 * 2 / 10
    assert cost.roofline_s(1, bytes_per_s=10.0, flops_per_s=100.0) == 20 * 1 / 10
