"""A sliding window computes what a window mask computes, in constant memory."""

import pytest
import torch

from models.kv_study.block_cache import block_caches
from models.kv_study.sliding_window import SlidingWindowKV, forward, window_mask

WINDOWS = [(1, 0), (3, 0), (3, 2), (7, 0), (5, 1)]


def caches(decoder, window, sinks=0):
    return [SlidingWindowKV(window, sinks) for _ in decoder.blocks]


@pytest.fixture(scope="module")
def decoder(tiny_model):
    return tiny_model(seed=2).decoder


@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
@pytest.mark.parametrize("chunks", [[6], [1, 1, 4], [2, 9, 1, 3]])
def test_chunks_and_then_tokens_match_a_window_mask_without_a_cache(decoder, window, sinks, chunks):
    """Tokens are decoded by the language model itself, which knows nothing of windows."""
    x = torch.randn(2, sum(chunks) + 14, 24)
    expected = forward(decoder, x, window, sinks)
    kv_cache, start, parts = caches(decoder, window, sinks), 0, []
    for n in chunks:
        parts.append(forward(decoder, x[:, start : start + n], window, sinks, kv_cache))
        start += n
    for i in range(start, x.size(1)):
        y, after = decoder(x[:, i : i + 1], None, block_caches(kv_cache), i)
        assert all(a is b for a, b in zip(after, kv_cache))
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-5)


def test_greedy_ids_are_those_of_the_mask_and_the_memory_is_constant(tiny_model):
    model = tiny_model(seed=3)
    window, ids = 6, torch.randint(4, 40, (2, 9))
    kv_cache = caches(model.decoder, window, sinks=1)
    hidden = forward(model.decoder, model.embed_tokens(ids), window, 1, kv_cache)
    sizes = set()
    for _ in range(80):  # beyond lm_max_position_embeddings=64
        plain = forward(model.decoder, model.embed_tokens(ids), window, 1)
        assert torch.equal(model.decoder.head(hidden[:, -1]).argmax(-1), model.decoder.head(plain[:, -1]).argmax(-1))
        ids = torch.cat([ids, model.decoder.head(plain[:, -1]).argmax(-1, keepdim=True)], 1)
        hidden = forward(model.decoder, model.embed_tokens(ids[:, -1:]), window, 1, kv_cache)
        sizes.add(kv_cache[0].bytes_used)
    assert sizes == {2 * 2 * 2 * (1 + window) * 4 * 4}, "keys and values, rows, heads, tokens, channels, bytes"
    assert len(ids[0].unique()) > 3


def test_the_mask_lets_each_token_see_the_window_and_the_sinks():
    assert window_mask(torch.arange(6), torch.arange(6), window=2, sinks=1).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 1, 1],
    ]
