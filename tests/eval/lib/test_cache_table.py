"""The table of all cache designs: each keeps its promise, and what is measured is what a formula gives."""

import pytest
import torch

from eval.lib.cache_table import cache_table, render


@pytest.fixture(scope="module")
def table(tiny_model, encoder_decoder):
    sizes = {"prompts": (8, 20), "batches": (1, 3), "new_tokens": 12, "window": 6, "rounds": 1}
    return cache_table(tiny_model(seed=2), encoder_decoder, torch.rand(1, 3, 16, 16), **sizes)


def test_every_design_chooses_the_ids_that_it_promises(table):
    assert table.failures == []
    names = [[row.design.strip() for row in rows] for rows in table.models.values()]
    assert [len(rows) for rows in names] == [7, 4] and "paged blocks" in names[0]
    assert all(min(row.prefill_ms + row.token_ms) > 0 for rows in table.models.values() for row in rows)


def test_bytes_per_token_follow_the_formula(table):
    rows = {row.design: row.bytes_per_token for row in table.models["language model"]}
    exact = 2 * 2 * 2 * 4 * 4  # keys and values, blocks, kv heads, channels, bytes of float32
    assert rows["per-block cache"] == rows["static cache"] == rows["paged blocks"] == exact
    assert rows["int8 cache"] == exact * (4 + 4) / (4 * 4) and rows["no cache"] == 0
    assert rows["sliding window, 6"] == exact * 6 / 32


def test_the_text_names_every_axis(table):
    text = render(table)
    for word in ("batch 3", "20 ms", "fork", "export", "chunk", "exact", "12 of 12"):
        assert word in text
