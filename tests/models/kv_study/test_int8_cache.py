"""An int8 cache: a quarter of the memory, and logits within a stated tolerance."""

import pytest
import torch

from models.kv_study.block_cache import prefill_state
from models.kv_study.int8_cache import Int8KV, quantize

TOLERANCE = 0.05  # of the logits' standard deviation, for random weights whose attention is far from uniform
SAME_IDS = 0.9  # of greedy choices after the same tokens


def empty(model):
    return prefill_state([Int8KV() for _ in model.decoder.blocks])


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rounding_error_is_half_a_127th_of_the_largest_magnitude(dtype):
    x = torch.randn(2, 3, 50, 8).to(dtype) * torch.logspace(-6, 4, 50)[:, None].to(dtype)
    x[0, 0, 0] = 0
    numbers, scale = quantize(x)
    assert numbers.dtype == torch.int8 and scale.dtype == dtype and scale.shape == (2, 3, 50, 1)
    error = (numbers.double() * scale.double() - x.double()).abs().amax(-1)
    limit = x.double().abs().amax(-1) / 254
    assert (error <= limit * (1.001 if dtype == torch.float32 else 2.1)).all()


@torch.inference_mode()
def test_logits_are_within_the_tolerance_and_ids_mostly_the_same(tiny_model):
    same = []
    for seed in range(4):
        model = tiny_model(seed)
        ids = torch.randint(4, 40, (4, 30))
        logits, state = model.prefill(ids[:, :10], None, None, empty(model))
        exact, exact_state = model.prefill(ids[:, :10])
        for i in range(10, 30):
            assert (logits - exact).abs().max() < 10 * TOLERANCE * exact.std()
            assert (logits - exact).pow(2).mean().sqrt() < TOLERANCE * exact.std()
            same.append(logits.argmax(-1) == exact.argmax(-1))
            logits, state = model.decode(ids[:, i], state)
            exact, exact_state = model.decode(ids[:, i], exact_state)
    assert torch.cat(same).float().mean() >= SAME_IDS


@torch.inference_mode()
def test_a_prefill_in_chunks_and_forks_give_what_one_pass_gives(tiny_model):
    """Every token has scales of its own, so neither chunks nor rows change what is stored."""
    model = tiny_model(1)
    ids = torch.randint(4, 40, (2, 12))
    _, whole = model.prefill(ids, None, None, empty(model))
    _, chunk = model.prefill(ids[:, :5], None, None, empty(model))
    model.prefill(ids.flip(1), None, None, chunk)  # another continuation of the same cache
    _, chunked = model.prefill(ids[:, 5:], None, None, chunk)
    turned = whole.rows(torch.tensor([1, 0, 0])).first(7)
    assert torch.equal(turned.kv_cache[0].key, whole.kv_cache[0].key[[1, 0, 0], :, :7])
    torch.testing.assert_close(chunked.kv_cache[0].key, whole.kv_cache[0].key, atol=0, rtol=1e-5)


@torch.inference_mode()
def test_memory_is_head_dim_plus_one_scale_per_vector(tiny_model):
    model = tiny_model()
    _, state = model.prefill(torch.randint(4, 40, (3, 10)), None, None, empty(model))
    vectors = 2 * 3 * 2 * 10  # keys and values, rows, heads, tokens
    assert [cache.bytes_used for cache in state.kv_cache] == 2 * [vectors * (4 + 4)], "4 channels, and a float32"
    assert Int8KV().bytes_used == 0
