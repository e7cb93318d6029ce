"""Every cache design yields the same tokens and is timed token by token."""

from dataclasses import replace

import pytest
import torch

from eval.lib.cache_memory import memory_table
from eval.lib.cache_timing import time_designs, timeline
from eval.lib.cache_variants import UNCACHED, encoder_decoder, language_model
from eval.speedup import table

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cases(tiny_model, request):
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[5, 3, 3, 3, 3, 7, 9]])
    return [
        language_model(tiny_model(), ids, image, 12),
        encoder_decoder(request.getfixturevalue("encoder_decoder"), torch.tensor([[20, 21, 22]]), image, 12),
    ]


def test_every_design_yields_the_same_tokens_one_by_one(cases):
    names = [[design.name for design in case.designs] for case in cases]
    assert names == [
        [UNCACHED, "per-block cache", "static cache", "static, exported"],
        [UNCACHED, "hooks", "cross recomputed", "cross-attention once", "static cache", "static, exported"],
    ]
    for case in cases:
        timelines = [timeline(design, 12, CPU) for design in case.designs]
        expected = timelines[0][0]
        assert all(torch.equal(ids, expected) for ids, _ in timelines)
        assert len(set(expected.tolist())) > 1, "not one token again and again"
        assert all(times == sorted(times) and len(times) == 12 for _, times in timelines)


def test_a_study_has_times_spreads_and_equal_ids(cases):
    result = time_designs(cases[1], [4, 8, 12], 2, CPU, log=lambda line: None)
    assert [curve.same_ids for curve in result.curves] == [12] * 6
    for curve in result.curves:
        assert curve.total_ms == sorted(curve.total_ms) and len(curve.spread_ms) == 3 and curve.token_ms > 0
    uncached, *cached = result.curves
    assert all(curve.flops[-1] < uncached.flops[-1] / 2 for curve in cached if curve.design != "cross recomputed")
    recomputed, once = cached[1:3]
    assert once.flops[-1] < recomputed.flops[-1] < uncached.flops[-1], "the image's keys and values are made once"
    assert result.vision_ms > 0 < result.prefill_ms
    text = table(result)
    assert text.count("times faster") == 5 and "12 of 12" in text and "±" in text


def test_ids_count_as_equal_up_to_the_first_that_differs(cases):
    correct, other = cases[0].designs[:2]

    def stream_with_an_error(n):
        for i, ids in enumerate(other.stream(n)):
            yield ids + (i == 5)

    case = replace(cases[0], designs=[correct, replace(other, stream=stream_with_an_error)])
    result = time_designs(case, [4, 8], 1, CPU, log=lambda line: None)
    assert [curve.same_ids for curve in result.curves] == [8, 5]


def test_the_memory_of_every_cache_is_what_the_formula_says(cases):
    for case in cases:
        result = time_designs(case, [4, 12], 1, CPU, log=lambda line: None)
        assert [memory.design for memory in result.memory] == [curve.design for curve in result.curves[1:]]
        cfg = case.model.cfg
        n_heads = cfg.lm_n_kv_heads if case is cases[0] else cfg.lm_n_heads
        for memory in result.memory:
            assert memory.tokens == case.prompt_tokens + 11
            assert memory.used == memory.formula == 2 * cfg.lm_n_blocks * n_heads * cfg.lm_head_dim * memory.tokens * 4
            assert memory.used <= memory.allocated and memory.per_token * memory.tokens == memory.used
            keeps_image = case is cases[1] and memory.design != "cross recomputed"
            assert memory.cross == keeps_image * 2 * cfg.lm_n_blocks * cfg.lm_hidden_dim * 16 * 4
        assert "bytes/token" in memory_table("cache", result.memory)
