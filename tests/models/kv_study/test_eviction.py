"""Eviction: what each policy keeps, and that what is kept is attended to as if the rest were masked."""

import pytest
import torch

from models.attention import attention
from models.cache import KVCache
from models.kv_study import eviction
from models.kv_study.block_cache import block_caches
from models.kv_study.eviction import POLICIES, EvictingKV, observed


def read(decoder, caches, x):
    with observed(decoder, caches):
        return decoder(x, None, block_caches(caches), caches[0].length)[0]


class MaskedKV(KVCache):
    """A full cache, whose attention is masked to the positions that an evicting cache holds, and the new token's."""

    def __init__(self, key, value, held):
        super().__init__(key, value)
        self.held = held

    def attend(self, q, k, v, mask, causal, dropout_p):
        visible = torch.zeros(k.shape[:-1], dtype=torch.bool).scatter(2, self.held, True)
        visible[..., -1] = True
        return attention(q, k, v, visible.repeat_interleave(q.size(1) // k.size(1), 1)[:, :, None], False, dropout_p)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("share", [0.5, 0.12])
def test_steps_after_eviction_are_full_attention_with_a_mask(tiny_model, name, share):
    torch.manual_seed(1)
    decoder = tiny_model(3).decoder
    x = torch.randn(2, 26, 24)
    caches = [EvictingKV(POLICIES[name], share) for _ in decoder.blocks]
    read(decoder, caches, x[:, :16])
    _, full = decoder(x[:, :16])
    for i in range(16, 26):
        n = -(-int(share * 100) * i // 100) if not POLICIES[name].once else -(-int(share * 100) * 16 // 100) + i - 16
        assert [cache.positions.shape for cache in caches] == 2 * [(2, 2, n)] and caches[0].length == i
        masked = [MaskedKV(kv.key, kv.value, cache.positions) for kv, cache in zip(full, caches)]
        with observed(decoder, masked):
            expected, full = decoder(x[:, i : i + 1], None, masked, i)
        torch.testing.assert_close(read(decoder, caches, x[:, i : i + 1]), expected, atol=1e-5, rtol=1e-5)
    assert caches[0].bytes_used == 2 * caches[0].key.numel() * 4


def test_scores_are_the_attention_received_by_queries_that_count(tiny_model):
    """Recomputed with loops from the first block's queries and keys; groups of three queries share a key."""
    q, k = torch.randn(1, 6, 12, 4), torch.randn(1, 2, 12, 4)
    for name, first in (("heavy hitters", 0), ("SnapKV", 4)):
        cache = EvictingKV(POLICIES[name], 1.0).append(k, k)
        cache.attend(q, k, k, None, True, 0.0)
        expected = torch.zeros(2, 12)
        for head in range(6):
            for query in range(first, 12):
                weights = (k[0, head // 3, : query + 1] @ q[0, head, query] / 2).softmax(0)
                expected[head // 3, : query + 1] += weights / 3
        torch.testing.assert_close(cache.scores[0], expected)


def test_each_policy_keeps_what_its_paper_says():
    scores = torch.tensor([[[0.0, 9, 1, 8, 2, 7, 3, 0, 0, 0, 0, 0]]])
    assert POLICIES["heavy hitters"].keep(scores, 5).tolist() == [[[1, 3, 9, 10, 11]]], "two highest and three newest"
    assert eviction.window(scores, 6).tolist() == [[[0, 1, 2, 9, 10, 11]]]
    assert eviction.window(scores, 10).tolist() == [[[0, 1, 2, 3, 6, 7, 8, 9, 10, 11]]], "never more than 4 sinks"
    peaks = torch.zeros(1, 1, 20).index_fill(2, torch.tensor([1, 6]), 1)
    assert eviction.snap(peaks, 17).tolist() == [[[*range(9), *range(12, 20)]]], "peaks, two neighbors a side, and 8"
    kept = eviction.snap(peaks, 6)[0, 0].tolist()
    assert kept[2] < 9 and kept[3:] == [17, 18, 19], "half of few places are for the newest"
    torch.manual_seed(0)
    drawn = torch.cat([POLICIES["random"].keep(scores, 4) for _ in range(3000)]).flatten()
    assert (drawn.bincount() / 3000 - 4 / 12).abs().max() < 0.05, "all with the same probability"
