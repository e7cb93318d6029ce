"""Paged blocks hold what was put there, share what is common, and are free again afterwards."""

import random

import pytest
import torch

from models.errors import InputError
from models.kv_study.block_cache import prefill_state
from models.kv_study.paged_cache import BlockPool, PagedKV


def tokens(n, rows=2):
    return torch.randn(rows, 3, n, 4)


def used(pool):
    return pool.n_blocks - len(pool.free)


def pools(model, n_blocks=64, block_size=4):
    return [BlockPool(n_blocks, block_size) for _ in model.decoder.blocks]


def empty(pools):
    return prefill_state([PagedKV(pool) for pool in pools])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("block_size", [1, 2, 4, 5, 16])
def test_every_cache_of_a_family_tree_holds_what_was_put_there(mode, block_size):
    """Forks, forks of forks, chosen rows and beginnings, against plain concatenation."""
    choose, pool = random.Random(block_size), BlockPool(4000, block_size)
    with mode():
        k, v = tokens(3), tokens(3)
        family = [(PagedKV(pool).append(k, v), k, v)]
        for _ in range(60):
            parent, key, value = choose.choice([family[-1], choose.choice(family)])
            k, v = tokens(n := choose.choice([1, 1, 1, 2, 9])), tokens(n)
            family.append((parent.append(k, v), torch.cat([key, k], -2), torch.cat([value, v], -2)))
            index, n = torch.tensor(choose.choices([0, 1], k=2)), choose.randint(1, parent.length)
            family.append((parent.rows(index), key[index], value[index]))
            family.append((parent.first(n), key[:, :, :n], value[:, :, :n]))
        for cache, key, value in family:
            assert torch.equal(cache.key, key) and torch.equal(cache.value, value) and cache.length == key.size(2)
    referred = {block for cache, _, _ in family for table in cache.tables for block in table}
    assert used(pool) == len(referred), "blocks are in use exactly if a cache refers to them"
    del family, cache, parent
    assert used(pool) == 0 and set(pool.references) == {0}


def test_questions_about_one_prefix_share_its_blocks_and_copy_the_half_full_one(tiny_model):
    model = tiny_model(seed=7)
    memory, prefix_ids = pools(model), torch.randint(4, 40, (1, 18))
    _, prefix = model.prefill(prefix_ids, None, None, empty(memory))
    assert used(memory[0]) == 5
    shared = prefix.rows(torch.zeros(6, dtype=torch.long))
    assert used(memory[0]) == 5, "a fork takes no memory"
    questions = torch.randint(4, 40, (6, 2))
    logits, state = model.prefill(questions, None, None, shared)
    whole, _ = model.prefill(torch.cat([prefix_ids.expand(6, -1), questions], 1))
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)
    assert used(memory[0]) == 4 + 6, "four full blocks for all, the fifth once per question: one written, five copied"
    assert state.kv_cache[0].bytes_used == 10 * 4 * 2 * 2 * 4 * 4
    again, _ = model.prefill(questions, None, None, shared)
    assert torch.equal(again, logits), "the prefix can be continued again"


def test_a_full_pool_raises_and_loses_nothing():
    pool = BlockPool(3, block_size=2)
    cache = PagedKV(pool).append(tokens(5, rows=1), tokens(5, rows=1))
    before = cache.key.clone()
    with pytest.raises(InputError, match="all 3 blocks of 2 tokens are in use"):
        cache.append(tokens(4, rows=1), tokens(4, rows=1))
    assert torch.equal(cache.key, before) and used(pool) == 3
    del cache
    assert used(pool) == 0
