"""Every cache design chooses the ids that it promises, holds the bytes of its formula, and is timed token by token."""

from dataclasses import replace

import pytest
import torch

from eval.lib.cache_study import Sizes, make_case, measure_case, timeline

SIZES = Sizes((4, 8, 12), prompts=(8, 20), batches=(1, 3), window=6, rounds=1)
IDS, TWIN_IDS = torch.tensor([[5, 3, 3, 3, 3, 7, 9]]), torch.tensor([[20, 21, 22]])
EXACT = 2 * 2 * 2 * 4 * 4  # keys and values, blocks, kv heads, channels, bytes of float32


@pytest.fixture(scope="module")
def image():
    return torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def study(tiny_model, image):
    return measure_case(make_case(tiny_model(), IDS, image, SIZES, export=False), SIZES)


@pytest.fixture(scope="module")
def twin_study(encoder_decoder, image):
    return measure_case(make_case(encoder_decoder, TWIN_IDS, image, SIZES, export=False), SIZES)


def test_every_design_chooses_the_ids_that_it_promises(study, twin_study):
    names = [[row.design.strip() for row in s.rows] for s in (study, twin_study)]
    assert names == [
        ["no cache", "per-block cache", "static cache", "paged blocks", "int8 cache", "sliding window, 6"],
        ["no cache", "hooks", "cross-attention once", "static cache"],
    ]
    assert study.failures == twin_study.failures == []
    wrong = replace(study, rows=[replace(study.rows[1], same_ids=5)])
    assert wrong.failures == ["language model on image and text: per-block cache differs from no cache after 5 tokens"]
    assert replace(study, rows=[replace(wrong.rows[0], is_rounded=True)]).failures == []


def test_ids_are_not_one_token_again_and_again(tiny_model, image):
    case = make_case(tiny_model(), IDS, image, SIZES, export=False)
    ids, times, run = timeline(case.designs[1].start, IDS, image, 12)
    assert len(set(ids)) > 1 and times == sorted(times) and len(times) == 12
    assert ids == tiny_model().generate(IDS, image, max_new_tokens=12)[0].tolist()
    assert run.bytes_used() == EXACT * (7 + 11), "the last token is not read"


@pytest.mark.full  # exports five graphs
def test_exported_graphs_choose_the_same_ids(tiny_model, encoder_decoder, image):
    for model, ids in ((tiny_model(), IDS), (encoder_decoder, TWIN_IDS)):
        study = measure_case(make_case(model, ids, image, SIZES), SIZES)
        assert [row.same_ids for row in study.rows if row.design == "static, exported"] == [12] and not study.failures


def test_times_are_of_every_length_prompt_and_batch(study, twin_study):
    for row in (*study.rows, *twin_study.rows):
        assert row.total_ms == sorted(row.total_ms) and len(row.spread_ms) == 3 and row.token_ms > 0
        assert len(row.prefill_ms) == len(row.step_ms) == 2 and min(row.prefill_ms + row.step_ms) > 0
    assert twin_study.rows[2].flops[-1] < twin_study.rows[0].flops[-1], "the image's keys and values are made once"
    none, full, window = (row.flops[-1] - row.flops[0] for row in (study.rows[0], study.rows[1], study.rows[-1]))
    assert window < full < none / 2


def test_bytes_per_token_follow_the_formula(study, twin_study):
    rows = {row.design.strip(): row.bytes_per_token for row in study.rows}
    assert rows["per-block cache"] == rows["static cache"] == EXACT
    assert rows["paged blocks"] == round(EXACT * 32 / 18, 1), "18 tokens take two blocks of 16"
    assert rows["int8 cache"] == EXACT * (4 + 8) / (4 * 4) and rows["no cache"] == 0
    assert rows["sliding window, 6"] == round(EXACT * 6 / 18, 1)
    kept = {row.design: row.cross_bytes for row in twin_study.rows}
    assert {row.bytes_per_token for row in twin_study.rows[1:]} == {2 * 2 * 24 * 4}
    image_bytes = 2 * 2 * 24 * 16 * 4
    assert list(kept.values()) == [0, image_bytes, image_bytes, image_bytes]
