"""Bytes of caches with fewer key and value heads."""

import torch

from eval.lib.cache_memory import compare_heads, memory_table


def test_grouped_and_multi_query_attention_use_a_third_and_a_ninth_of_the_bytes():
    rows = compare_heads(torch.device("cpu"), tokens=20, width=36, n_blocks=2, rounds=1)
    mha, gqa, mqa = (row.used for row in rows)
    assert mha == 3 * gqa == 9 * mqa == 2 * 2 * 9 * 4 * 20 * 4
    assert all(row.used == row.formula <= row.allocated and row.token_ms > 0 for row in rows)
    assert "ms/token" in memory_table("heads", rows).splitlines()[0]
