"""Quantized caches: rounding errors, memory with scales, and logits within a stated tolerance."""

import pytest
import torch

from models.errors import InputError
from models.kv_study.block_cache import prefill_state
from models.kv_study.quantized_cache import QuantizedKV, dequantize, quantize

TOLERANCE = 0.05  # of the logits' standard deviation, for random weights whose attention is far from uniform
SAME_IDS = 0.9  # of greedy choices after the same tokens


def empty(model, bits=8, group=1):
    return prefill_state([QuantizedKV(bits, group) for _ in model.decoder.blocks])


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_half_a_step_of_the_range(bits, dim, dtype):
    x = torch.randn(2, 3, 50, 8).to(dtype) * torch.logspace(-6, 4, 50)[:, None].to(dtype)
    x[0, 0, 0] = 0
    packed, scale, low = quantize(x, bits, dim)
    assert packed.shape == (2, 3, 50, bits) and packed.dtype == torch.uint8 and scale.dtype == low.dtype == dtype
    error = (dequantize(packed, scale.double(), low.double(), bits) - x.double()).abs()
    spread = x.double().amax(dim, keepdim=True) - x.double().amin(dim, keepdim=True)
    rounded = 1e-6 if dtype == torch.float32 else 2**-8  # of scale and lowest value
    assert (error <= spread * (0.5 / (2**bits - 1) + rounded)).all()


@pytest.mark.parametrize("group", [1, 8])
def test_logits_are_within_the_tolerance_and_ids_mostly_the_same(tiny_model, group):
    same = []
    for seed in range(4):
        model = tiny_model(seed)
        ids = torch.randint(4, 40, (4, 30))
        logits, state = model.prefill(ids[:, :10], None, None, empty(model, group=group))
        exact, exact_state = model.prefill(ids[:, :10])
        for i in range(10, 30):
            assert (logits - exact).abs().max() < 10 * TOLERANCE * exact.std()
            assert (logits - exact).pow(2).mean().sqrt() < TOLERANCE * exact.std()
            same.append(logits.argmax(-1) == exact.argmax(-1))
            logits, state = model.decode(ids[:, i], state)
            exact, exact_state = model.decode(ids[:, i], exact_state)
    assert torch.cat(same).float().mean() >= SAME_IDS


def test_keys_have_scales_by_channel_and_incomplete_groups_are_exact():
    """A channel a thousand times the others': at 2 bits it hides them, unless it has a scale of its own."""
    key, value = torch.randn(1, 2, 19, 8), torch.randn(1, 2, 19, 8)
    key[..., 3] += 1000
    grouped, kv = QuantizedKV(2, 8), QuantizedKV(2, 8)
    for i in range(19):  # token by token or at once
        kv = kv.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
    grouped = grouped.append(key, value)
    assert torch.equal(kv.key, grouped.key) and torch.equal(kv.value, grouped.value) and kv.length == 19
    assert torch.equal(kv.key[:, :, 16:], key[:, :, 16:]), "16 tokens fill two groups of 8"
    wrong = lambda cache: (cache.key - key)[..., :3].abs().mean()  # noqa: E731
    assert wrong(kv) < 0.5 * wrong(QuantizedKV(2).append(key, value))
    step = (key[:, :, :8].amax(2) - key[:, :, :8].amin(2)) / 3
    assert ((kv.key - key)[:, :, :8].abs() <= step[:, :, None] * 0.501 + 1e-3).all()


def test_a_prefill_in_chunks_and_forks_give_what_one_pass_gives(tiny_model):
    """With scales for every token, neither chunks nor rows change what is stored."""
    model = tiny_model(1)
    ids = torch.randint(4, 40, (2, 12))
    _, whole = model.prefill(ids, None, None, empty(model))
    _, chunk = model.prefill(ids[:, :5], None, None, empty(model))
    model.prefill(ids.flip(1), None, None, chunk)  # another continuation of the same cache
    _, chunked = model.prefill(ids[:, 5:], None, None, chunk)
    turned = whole.rows(torch.tensor([1, 0, 0]))
    assert torch.equal(turned.kv_cache[0].key, whole.kv_cache[0].key[[1, 0, 0]])
    torch.testing.assert_close(chunked.kv_cache[0].key, whole.kv_cache[0].key, atol=0, rtol=1e-5)


def test_memory_is_packed_numbers_with_scales_and_lowest_values():
    key = torch.randn(3, 2, 19, 8)
    tokens = lambda bits: 2 * 3 * 2 * 19 * (bits + 8)  # noqa: E731  keys and values, 8 channels, two float32
    assert [QuantizedKV(bits).append(key, key).bytes_used for bits in (8, 4, 2)] == [tokens(bits) for bits in (8, 4, 2)]
    whole, rest = 3 * 2 * (2 * 16 * 2 + 2 * 2 * 8 * 4 + 16 * 8), 3 * 2 * 2 * 3 * 8 * 4
    assert QuantizedKV(2, 8).append(key, key).bytes_used == whole + rest
    assert QuantizedKV().bytes_used == 0


def test_other_numbers_of_bits_raise():
    with pytest.raises(InputError, match="bits=3"):
        QuantizedKV(3)
