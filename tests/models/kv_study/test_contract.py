"""The contract of a cache design, a row for each: read in chunks it computes what the model computes without a cache,
it holds what was put there, and it takes the bytes of its formula."""

import random
from functools import partial
from math import ceil

import pytest
import torch

from models.cache import KVCache
from models.common.errors import InputError
from models.config import VLMConfig
from models.kv_study.beam_search import beam_search
from models.kv_study.block_cache import prefill_state
from models.kv_study.eviction import POLICIES, EvictingKV
from models.kv_study.hook_cache import install_kv_cache_hooks
from models.kv_study.paged_cache import BlockPool, PagedKV
from models.kv_study.quantized_cache import QuantizedKV, dequantize, quantize
from models.kv_study.sharing import CrossLayerModel, LatentAttention
from models.kv_study.sliding_window import SlidingWindowKV, forward, window_mask
from models.kv_study.static_cache import LanguageModelStep, language_model_cache
from models.kv_study.text_decoder import TextDecoder, TextPrefillState
from models.language_model import LanguageModel, apply_rope, rope_cos_sin
from support import ROOT, TINY, randomize

B, H, D = 2, 2, 4  # rows, heads and channels of the tiny model's cache
TOKEN = 2 * B * H * D * 4  # bytes of keys and values of all rows

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
    "window of 7": (lambda: SlidingWindowKV(7), False, 0, lambda n: min(n, 7) * TOKEN),
    "window of 4, 2 sinks": (lambda: SlidingWindowKV(4, 2), False, 0, lambda n: min(n, 6) * TOKEN),
}  # fmt: skip


def test_every_file_with_a_cache_has_a_row():
    """Evicting caches append with attention's scores and have a file of tests; block_cache has the protocol."""
    written = {path.stem for path in (ROOT / "models/kv_study").glob("*.py") if "def bytes_used" in path.read_text()}
    rows = {type(make()).__module__.rpartition(".")[2] for make, *_ in DESIGNS.values()}
    assert written - {"block_cache", "eviction"} == rows - {"cache"}


def language_model(kind=LanguageModel) -> LanguageModel:
    return randomize(kind(VLMConfig(**TINY | {"lm_use_tokens": True, "lm_n_blocks": 4}))).eval()


def latent_model(cfg) -> LanguageModel:
    model = LanguageModel(cfg)
    for block in model.blocks:
        block.attn = LatentAttention(cfg, latent_dim=5)
    return model


def by_model(kind=LanguageModel, make=None):
    model, length = language_model(kind), 0
    caches = [make() for _ in model.blocks] if make else None

    def read(ids):
        nonlocal caches, length
        logits, caches = model(ids, None, caches, length)
        length += ids.size(1)
        return logits

    return read, lambda ids: model(ids)[0]


def by_window(window, sinks):
    model = language_model()
    caches = [SlidingWindowKV(window, sinks) for _ in model.blocks]

    def read(ids):
        if ids.size(1) == 1 and 0 < caches[0].length < model.cfg.lm_max_position_embeddings:
            logits, after = model(ids, None, caches, caches[0].length)
            assert all(a is b for a, b in zip(after, caches, strict=True))
            return logits
        return model.head(forward(model, model.token_embedding(ids), window, sinks, caches))

    return read, lambda ids: model.head(forward(model, model.token_embedding(ids), window, sinks))


def by_static_step():
    model, capacity, start = language_model(), 24, 0
    cache, mask = language_model_cache(model, B, capacity), torch.ones(B, capacity, dtype=torch.long)

    def read(ids):
        nonlocal start
        logits = LanguageModelStep(model)(ids, mask, torch.tensor(start), cache)
        start += ids.size(1)
        return logits[:, None]

    return read, lambda ids: model(ids)[0]


def by_text_decoder(hooks):
    n_head, n_images = random.choice([1, 2, 4]), random.choice([1, B])
    decoder = randomize(TextDecoder(40, 64, 8 * n_head, n_head, random.randint(1, 3))).eval()
    xa = torch.randn(n_images, 5, 8 * n_head)
    cache, state = None, TextPrefillState(decoder.project_cross_kv(xa))

    def read_by_hooks(ids):
        nonlocal cache
        with install_kv_cache_hooks(decoder, cache) as cache:
            return decoder(ids, xa)

    def read(ids):
        nonlocal state
        x, state = decoder.forward_cached(ids, state)
        return decoder.logits(x)

    return read_by_hooks if hooks else read, lambda ids: decoder(ids, xa.repeat_interleave(B // n_images, 0))


# design: (how it reads, error as a part of the logits' standard deviation, how often the likeliest token must be it)
READERS = {
    **{
        name: (partial(by_model, make=DESIGNS[name][0]), tolerance, share)
        for name, tolerance, share in (
            ("per block", 1e-5, 1), ("paged, 4", 1e-5, 1), ("8 bits", 0.05, 0.9), ("2 bits, KIVI", 2, 0.3)
        )
    },
    "its own": (by_model, 1e-5, 1),
    "shared by two blocks": (partial(by_model, CrossLayerModel), 1e-5, 1),
    "latent": (partial(by_model, latent_model), 1e-5, 1),
    **{
        f"window of {window}, {sinks} sinks": (partial(by_window, window, sinks), 1e-5, 1)
        for window, sinks in ((1, 0), (3, 0), (3, 2), (7, 0), (5, 1))
    },
    "static": (by_static_step, 1e-5, 1),
    "cross-attention": (partial(by_text_decoder, False), 1e-5, 1),
    "cross-attention by hooks": (partial(by_text_decoder, True), 1e-5, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_chunks_and_tokens_are_read_as_by_the_model_without_a_cache(name):
    make, tolerance, share = READERS[name]
    same = []
    for seed, chunks in enumerate([(6,), (1, 1, 4), (2, 9, 1, 3), (5, 4), (10,)]):
        random.seed(seed)
        torch.manual_seed(seed)
        read, whole = make()
        ids = torch.randint(40, (B, 24))
        expected, stop = whole(ids), 0
        for part in ids.split([*chunks, *[1] * (24 - sum(chunks))], 1):
            logits, stop = read(part), stop + part.size(1)
            exact = expected[:, stop - logits.size(1) : stop]
            assert (logits - exact).pow(2).mean().sqrt() < tolerance * exact.std()
            same.append((logits[:, -1].argmax(-1) == exact[:, -1].argmax(-1)).float().mean())
    assert torch.stack(same).mean() >= share


def test_a_window_goes_on_beyond_the_models_positions():
    read, whole = by_window(6, 1)
    ids = torch.randint(40, (B, 90))
    parts = torch.cat([read(part) for part in ids.split([9, *[1] * 81], 1)], 1)
    torch.testing.assert_close(parts, whole(ids), atol=1e-4, rtol=1e-4)


def used(pool):
    return pool.n_blocks - len(pool.free)


def tokens(n):
    return torch.randn(2, B, H, n, D)


def assert_holds(cache, both, error):
    """Keys and values are those of the positions that are held; both (2, B, H, n, D) are all tokens'."""
    n = both.size(3)
    held = getattr(cache, "positions", torch.arange(n))
    assert cache.length == n
    if hasattr(cache, "window"):
        assert {*range(min(cache.sinks, n)), *range(max(0, n - cache.window), n)} <= {*held.tolist()}
    for stored, expected in zip((cache.key, cache.value), both[:, :, :, held]):
        spread = both.amax() - both.amin()
        assert (stored - expected).abs().max() <= error * spread + (1e-5 if error else 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", DESIGNS)
def test_every_cache_of_a_family_tree_holds_what_was_put_there(name, mode):
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
        assert used(pool) == len(referred), "in use exactly if a cache refers to it"
        del family, cache, parent, child
        assert len(pool.free) == pool.n_blocks and set(pool.references) == {0}


@pytest.mark.parametrize("name", DESIGNS)
def test_a_cache_is_continued_in_another_mode_and_its_bytes_follow_the_formula(name):
    make, forks, error, n_bytes = DESIGNS[name]
    first, second = tokens(3), tokens(1)
    with torch.inference_mode():
        cache = make().append(*first)
    if forks:
        assert_holds(cache.append(*second), torch.cat([first, second], 3), error)
    cache = make()
    for n in range(20):
        assert cache.bytes_used == n_bytes(n)
        cache = cache.append(*tokens(1))


REFUSALS = {
    "share=0": lambda: EvictingKV(POLICIES["random"], 0),
    "bits=3": lambda: QuantizedKV(3),
    "heads of 6 numbers do not fill bytes of 4 at bits=2": lambda: QuantizedKV(2).append(*torch.randn(2, 1, 1, 3, 6)),
    "window=0": lambda: SlidingWindowKV(0),
    "n_blocks=0": lambda: BlockPool(0),
    "n_beams=0 and max_new_tokens=1 must be": lambda: beam_search(torch.zeros(1, 4), None, n_beams=0, max_new_tokens=1),
    "n_beams=1 and max_new_tokens=0 must be": lambda: beam_search(torch.zeros(1, 4), None, n_beams=1, max_new_tokens=0),
    "capacity=65 exceeds lm_max_pos": lambda: language_model_cache(language_model(), 1, 65),
    "all 3 blocks of 2 tokens are in use": lambda: PagedKV(BlockPool(3, 2)).append(*torch.randn(2, 1, 1, 7, D)),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_wrong_use_is_an_input_error(message):
    with pytest.raises(InputError, match=message):
        REFUSALS[message]()


def test_the_mask_lets_each_token_see_the_window_and_the_sinks():
    mask = window_mask(torch.arange(6), torch.arange(6), window=2, sinks=1).int().tolist()
    assert ["".join(map(str, row)) for row in mask] == ["100000", "110000", "111000", "101100", "100110", "100011"]


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


def test_absorbed_projections_are_attention_with_keys_and_values_of_every_head():
    model = language_model(latent_model)
    attn, cfg = model.blocks[0].attn, model.cfg
    x, (cos, sin) = torch.randn(2, 7, 24), rope_cos_sin(torch.arange(7), cfg)
    q = attn.q_proj(x).view(2, 7, 6, 8).transpose(1, 2)
    latent, rotary = attn.down_proj(x).split([5, 4], -1)
    k = torch.einsum("btr,hdr->bhtd", latent, attn.k_up)
    v = torch.einsum("btr,hdr->bhtd", latent, attn.v_up)
    k = torch.cat([k, apply_rope(rotary[:, None], cos, sin).expand(2, 6, 7, 4)], -1)
    q = torch.cat([q[..., :4], apply_rope(q[..., 4:], cos, sin)], -1)
    scores = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf)
    expected = attn.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x, cos, sin)[0], expected, atol=1e-4, rtol=1e-4)


def test_a_shared_block_is_attention_with_the_projections_of_the_block_before():
    model, ids = language_model(CrossLayerModel), torch.randint(40, (2, 9))
    x, (cos, sin) = model.token_embedding(ids), rope_cos_sin(torch.arange(9), model.cfg)
    for owner, shared in zip(model.blocks[::2], model.blocks[1::2]):
        y, kv = owner(x, cos, sin)
        q = apply_rope(shared.attn.q_proj(shared.norm1(y)).view(2, 9, 6, 4).transpose(1, 2), cos, sin)
        k, v = (part.repeat_interleave(3, 1) for part in (kv.key, kv.value))
        scores = (q @ k.mT / 2).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
        y = y + shared.attn.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = y + shared.mlp(shared.norm2(y))
    torch.testing.assert_close(model.head(model.norm(x)), model(ids)[0], atol=1e-4, rtol=1e-4)
