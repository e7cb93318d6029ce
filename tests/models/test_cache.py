"""A cache is immutable: its contents stay, however often it is continued."""

from itertools import pairwise

import torch

from models.cache import KVCache, capacity_for, storage_bytes


def tokens(n, rows=2):
    return torch.randn(rows, 3, n, 4)


@torch.no_grad()
def test_appending_one_by_one_copies_each_token_a_few_times_and_wastes_less_than_a_quarter():
    caches = [KVCache(tokens(5), tokens(5))]
    for _ in range(2000):
        caches.append(caches[-1].append(tokens(1), tokens(1)))
    moves = [a for a, b in pairwise(caches) if a.key.data_ptr() != b.key.data_ptr()]
    assert sum(cache.length for cache in moves) <= 9 * caches[-1].length and len(moves) <= 35
    assert all(cache.bytes_allocated <= 1.25 * cache.bytes_used for cache in caches if cache.length >= 128)


@torch.no_grad()
def test_bytes_are_those_of_the_tokens_and_of_the_storages():
    cache = KVCache(tokens(40), tokens(40))
    per_token = 2 * 2 * 3 * 4 * 4  # keys and values, rows, heads, channels, bytes of float32
    assert cache.bytes_used == cache.bytes_allocated == 40 * per_token
    longer = cache.append(tokens(1), tokens(1))
    assert longer.bytes_used == 41 * per_token and longer.bytes_allocated == capacity_for(41) * per_token
    first = longer.first(3)
    assert first.bytes_used == 3 * per_token and first.bytes_allocated == longer.bytes_allocated, "it keeps all alive"
    assert storage_bytes([cache.key, cache.key[:1], torch.zeros(3)]) == cache.key.nbytes + 3 * 4


def test_gradients_flow_through_a_cache_even_after_it_was_continued():
    leaves = [tokens(n).requires_grad_() for n in (3, 3, 1, 1, 2, 2)]
    k1, v1, k2, v2, k3, v3 = leaves
    start = KVCache(k1, v1).append(k2, v2)
    end = start.append(k3, v3)
    weights = tokens(6)
    through_cache = (end.key.sin() * end.value * weights).sum()
    with torch.no_grad():
        start.append(tokens(2), tokens(2)).append(tokens(1), tokens(1))
        end.append(tokens(1), tokens(1))
    plain = (torch.cat([k1, k2, k3], -2).sin() * torch.cat([v1, v2, v3], -2) * weights).sum()
    for gradient, expected in zip(torch.autograd.grad(through_cache, leaves), torch.autograd.grad(plain, leaves)):
        assert torch.equal(gradient, expected)
