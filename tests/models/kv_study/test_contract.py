"""The contract of a block's cache, a row for each design: append, rows, first, bytes, and the model's logits."""

import random
from math import ceil

import pytest
import torch

from models.cache import KVCache
from models.errors import InputError
from models.kv_study.block_cache import prefill_state
from models.kv_study.eviction import POLICIES, EvictingKV
from models.kv_study.paged_cache import BlockPool, PagedKV
from models.kv_study.quantized_cache import QuantizedKV, dequantize, quantize
from models.kv_study.sliding_window import SlidingWindowKV

B, H, D = 2, 2, 4  # rows, heads and channels of tiny_model's cache
TOKEN = 2 * B * H * D * 4  # bytes of keys and values of all rows


class Unbounded(SlidingWindowKV):
    """A window that holds all that the tests read, for the model's logits."""

    def __init__(self):
        super().__init__(100)


# design: (an empty cache, whether append leaves it valid, error per unit of range, bytes after n tokens)
DESIGNS = {
    "per block": (lambda: KVCache(*torch.empty(2, B, H, 0, D)), True, 0, lambda n: n * TOKEN),
    "paged, 1": (lambda: PagedKV(BlockPool(900, 1)), True, 0, lambda n: n * TOKEN),
    "paged, 4": (lambda: PagedKV(BlockPool(900, 4)), True, 0, lambda n: ceil(n / 4) * 4 * TOKEN),
    "paged, 16": (lambda: PagedKV(BlockPool(900, 16)), True, 0, lambda n: ceil(n / 16) * 16 * TOKEN),
    "8 bits": (lambda: QuantizedKV(8), True, 0.5 / 255, lambda n: 2 * B * H * n * (D + 8)),
    "4 bits": (lambda: QuantizedKV(4), True, 0.5 / 15, lambda n: 2 * B * H * n * (D // 2 + 8)),
    "2 bits, KIVI": (
        lambda: QuantizedKV(2, 8), True, 0.5 / 3,
        lambda n: B * H * (n // 8 * (2 * 8 + 2 * D * 4 + 8 * 8) + 2 * (n % 8) * D * 4),
    ),
    "window of 7": (lambda: SlidingWindowKV(7), False, 0, None),
    "window of 4, 2 sinks": (lambda: SlidingWindowKV(4, 2), False, 0, None),
}  # fmt: skip


def tokens(n):
    return torch.randn(2, B, H, n, D)


def assert_holds(cache, both, error):
    """Keys and values are those of the positions that are held; both (2, B, H, n, D) are all tokens'."""
    held = getattr(cache, "positions", torch.arange(both.size(3)))
    assert cache.length == both.size(3)
    for stored, expected in zip((cache.key, cache.value), both[:, :, :, held]):
        spread = both.amax() - both.amin()
        assert (stored - expected).abs().max() <= error * spread + (1e-5 if error else 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", DESIGNS)
def test_every_cache_of_a_family_tree_holds_what_was_put_there(name, mode):
    """Continuations, second continuations, chosen rows and beginnings, against plain concatenation."""
    make, forks, error, _ = DESIGNS[name]
    choose = random.Random(name)
    with mode():
        first = tokens(3)
        family = [(make().append(*first), first)]
        for _ in range(40):
            at = choose.choice([len(family) - 1, choose.randrange(len(family))])
            parent, both = family[at]
            new = tokens(choose.choice([1, 1, 1, 2, 9]))
            child = parent.append(*new), torch.cat([both, new], 3)
            if forks:
                family.append(child)
            else:
                family[at] = child  # written in place
            parent, both = family[at]
            index = torch.tensor(choose.choices([0, 1], k=2))
            family.append((parent.rows(index), both[:, index]))
            if hasattr(parent, "first"):
                n = choose.randint(1, parent.length)
                family.append((parent.first(n), both[:, :, :, :n]))
        for cache, both in family:
            assert_holds(cache, both, error)
    if name.startswith("paged"):
        pool = cache.pool
        referred = {block for cache, _ in family for table in cache.tables for block in table}
        assert pool.n_blocks - len(pool.free) == len(referred), "in use exactly if a cache refers to it"
        del family, cache, parent, child
        assert len(pool.free) == pool.n_blocks and set(pool.references) == {0}


@pytest.mark.parametrize("name", [name for name in DESIGNS if DESIGNS[name][3]])
@pytest.mark.parametrize("n", [1, 8, 19])
def test_bytes_follow_the_formula(name, n):
    make, _, _, n_bytes = DESIGNS[name]
    cache = make().append(*tokens(n))
    expected = n_bytes(n)
    assert cache.bytes_used == expected
    if name != "per block":
        assert make().bytes_used == 0


@pytest.mark.parametrize(
    ("name", "tolerance"),  # of the logits' standard deviation
    [("per block", 1e-5), ("paged, 4", 1e-5), ("8 bits", 0.05), ("2 bits, KIVI", 2), ("all", 1e-5)],
)
def test_the_models_logits_are_those_without_a_cache(tiny_model, name, tolerance):
    make = Unbounded if name == "all" else DESIGNS[name][0]
    same = []
    for seed in range(4):
        model = tiny_model(seed)
        ids = torch.randint(4, 40, (B, 22))
        prefix = prefill_state([make() for _ in model.decoder.blocks])
        logits, state = model.prefill(ids[:, :10], None, None, prefix)
        for i in range(10, 22):
            exact, _ = model.prefill(ids[:, :i])
            assert (logits - exact).pow(2).mean().sqrt() < tolerance * exact.std()
            same.append(logits.argmax(-1) == exact.argmax(-1))
            logits, state = model.decode(ids[:, i], state)
    assert torch.cat(same).float().mean() >= (0.9 if tolerance < 1 else 0.3)


REFUSALS = {
    "share=0": lambda: EvictingKV(POLICIES["random"], 0),
    "bits=3": lambda: QuantizedKV(3),
    "heads of 6 numbers do not fill bytes of 4 at bits=2": lambda: QuantizedKV(2).append(*torch.randn(2, 1, 1, 3, 6)),
    "window=0": lambda: SlidingWindowKV(0),
    "n_blocks=0": lambda: BlockPool(0),
    "all 3 blocks of 2 tokens are in use": lambda: PagedKV(BlockPool(3, 2)).append(*torch.randn(2, 1, 1, 7, D)),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_wrong_use_is_an_input_error(message):
    with pytest.raises(InputError, match=message):
        REFUSALS[message]()


# ---- paged ----------------------------------------------------------------------------------------------------------


def used(pool):
    return pool.n_blocks - len(pool.free)


def test_questions_about_one_prefix_share_its_blocks_and_copy_the_half_full_one(tiny_model):
    model = tiny_model(seed=7)
    pools = [BlockPool(64, 4) for _ in model.decoder.blocks]
    prefix_ids, questions = torch.randint(4, 40, (1, 18)), torch.randint(4, 40, (6, 2))
    _, prefix = model.prefill(prefix_ids, None, None, prefill_state([PagedKV(pool) for pool in pools]))
    shared = prefix.rows(torch.zeros(6, dtype=torch.long))
    assert used(pools[0]) == 5, "a fork takes no memory"
    logits, state = model.prefill(questions, None, None, shared)
    whole, _ = model.prefill(torch.cat([prefix_ids.expand(6, -1), questions], 1))
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)
    assert used(pools[0]) == 4 + 6, "four full blocks for all, the fifth once per question: one written, five copied"
    assert state.kv_cache[0].bytes_used == 10 * 4 * 2 * H * D * 4
    again, _ = model.prefill(questions, None, None, shared)
    assert torch.equal(again, logits), "the prefix can be continued again"


def test_a_full_pool_goes_on_after_a_rollback_and_copies_what_is_shared():
    pool, both = BlockPool(2, 4), tokens(8)[:, :1]
    cache = PagedKV(pool).append(*both).first(6)
    other = torch.randn(2, 1, H, 2, D)
    with pytest.raises(InputError, match="in use"):
        kept = cache.first(6)  # a second cache of the half-full block
        cache.append(*other)
    del kept
    cache = cache.append(*other)
    assert_holds(cache, torch.cat([both[..., :6, :], other], 3), 0)
    assert used(pool) == 2


# ---- quantized ------------------------------------------------------------------------------------------------------


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


def test_keys_have_scales_by_channel_and_incomplete_groups_are_exact():
    """A channel a thousand times the others': at 2 bits it hides them, unless it has a scale of its own."""
    key, value = torch.randn(2, 1, 2, 19, 8)
    key[..., 3] += 1000
    grouped, kv = QuantizedKV(2, 8).append(key, value), QuantizedKV(2, 8)
    for i in range(19):  # token by token or at once
        kv = kv.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
    assert torch.equal(kv.key, grouped.key) and torch.equal(kv.value, grouped.value)
    assert torch.equal(kv.key[:, :, 16:], key[:, :, 16:]), "16 tokens fill two groups of 8"
    wrong = lambda cache: (cache.key - key)[..., :3].abs().mean()  # noqa: E731
    assert wrong(kv) < 0.5 * wrong(QuantizedKV(2).append(key, value))
