"""The encoder-decoder and its two caches, explicit and by hooks, compute what it computes without a cache."""

import copy
import random
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise, product

import pytest
import torch

from models.decoding import SamplingParams
from models.errors import InputError
from models.kv_study.hook_cache import HookCache, install_kv_cache_hooks
from models.kv_study.text_decoder import TextDecoder, TextPrefillState
from support import randomize


def chunked_logits(decoder, ids, xa, cuts):
    """Compute ids in chunks that start at cuts, with the hook cache: logits of all tokens, and the cache."""
    cache, logits = HookCache(), []
    for start, stop in pairwise([0, *cuts, ids.size(1)]):
        with install_kv_cache_hooks(decoder, cache) as extended:
            logits.append(decoder(ids[:, start:stop], xa))
        cache = extended
    return torch.cat(logits, 1), cache


@contextmanager
def projected_rows(decoder):
    """Count the rows that each key and value projection computes, by (block, attention, key or value)."""
    rows, handles = Counter(), []
    for i, block in enumerate(decoder.blocks):
        for attn, kind in product(("attn", "cross_attn"), ("key", "value")):
            count = lambda linear, args, output, at=(i, attn, kind): rows.update({at: args[0][..., 0].numel()})  # noqa: E731
            handles.append(getattr(getattr(block, attn), kind).register_forward_hook(count))
    yield rows
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("seed", range(10))
def test_chunked_prefill_matches_a_single_pass(seed):
    """For both caches, any chunks, heads, depths and batches, and images shared by several sequences, to 1e-4."""
    rng = random.Random(seed)
    n_head, n_layer, n_images, beams = rng.choice([1, 2, 4]), rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 3)
    length = rng.randint(1, 8)
    cuts = sorted(rng.sample(range(1, length), rng.randint(0, min(3, length - 1))))
    torch.manual_seed(seed)
    decoder = randomize(TextDecoder(20, 8, 8 * n_head, n_head, n_layer)).eval()
    ids, xa = torch.randint(20, (n_images * beams, length)), torch.randn(n_images, 5, 8 * n_head)
    whole = decoder(ids, xa.repeat_interleave(beams, 0))
    state, pieces = TextPrefillState(decoder.project_cross_kv(xa)), []
    for start, stop in pairwise([0, *cuts, length]):
        x, state = decoder.forward_cached(ids[:, start:stop], state)
        pieces.append(decoder.logits(x))
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(chunked_logits(decoder, ids, xa, cuts)[0], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=1.0, seed=1), SamplingParams(repetition_penalty=5.0)],
    ids=["greedy", "sampled", "repetition penalty"],
)
def test_generate_returns_the_same_ids_with_and_without_cache(encoder_decoder, sampling):
    ids = torch.randint(0, 40, (3, 4))
    options = {"max_new_tokens": 20, "sampling": sampling, "n_samples": 2, "eos_token_id": 7}
    for images in torch.rand(2, 3, 3, 16, 16):  # of which nothing is carried over to the next
        cached = encoder_decoder.generate(ids, images, **options)
        assert torch.equal(cached, encoder_decoder.generate(ids, images, **options, use_kv_cache=False))
        assert cached.size(0) == 6


def test_a_repetition_penalty_also_counts_the_prompt(encoder_decoder):
    """With a huge penalty, the token that would be chosen is not chosen once the prompt contains it."""
    images, ids = torch.rand(1, 3, 16, 16), torch.randint(0, 40, (1, 4))
    first = encoder_decoder.generate(ids, images, max_new_tokens=1)
    ids[0, 0] = first.item()  # keep the last token, on which the choice depends
    unpenalized = encoder_decoder.generate(ids, images, max_new_tokens=1)
    ids[0, 0] = unpenalized.item()
    penalized = encoder_decoder.generate(ids, images, max_new_tokens=1, sampling=SamplingParams(repetition_penalty=1e9))
    assert penalized.item() not in ids[0].tolist()


@pytest.mark.parametrize("n_samples", [1, 4])
def test_an_image_is_projected_once_for_any_number_of_tokens_and_samples(encoder_decoder, n_samples):
    """Two images of 16 patches are 32 rows per cross-attention projection; each token but the last is one row."""
    images, ids = torch.rand(2, 3, 16, 16), torch.randint(0, 40, (2, 4))
    with projected_rows(encoder_decoder.decoder) as rows:
        encoder_decoder.generate(ids, images, max_new_tokens=10, n_samples=n_samples)
    assert len(rows) == 2 * 2 * len(encoder_decoder.decoder.blocks)
    for (_, attn, _), n in rows.items():
        assert n == (2 * 16 if attn == "cross_attn" else 2 * 4 + 2 * n_samples * 9)


@pytest.mark.parametrize("design", ["hooks", "explicit"])
def test_reordered_beams_match_a_fresh_prefill(encoder_decoder, design):
    decoder, xa = encoder_decoder.decoder, encoder_decoder.encode(torch.rand(1, 3, 16, 16))
    ids, order = torch.randint(0, 40, (3, 6)), torch.tensor([2, 0, 0])
    new = torch.randint(0, 40, (3, 1))
    whole = decoder(torch.cat([ids[order], new], 1), xa)[:, -1:]
    if design == "hooks":
        _, cache = chunked_logits(decoder, ids, xa, [2])
        reordered = cache.rows(order)
        assert all(reordered.cross_kv[linear] is kv for linear, kv in cache.cross_kv.items())
        with install_kv_cache_hooks(decoder, reordered):
            logits = decoder(new, xa, start_pos=6)
    else:
        _, state = decoder.forward_cached(ids, TextPrefillState(decoder.project_cross_kv(xa)))
        reordered = state.rows(order)
        assert reordered.cross_kv is state.cross_kv
        logits = decoder.logits(decoder.forward_cached(new, reordered)[0])
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


def count_hooks(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def test_hooks_are_removed_after_an_error_and_the_past_is_unchanged(encoder_decoder):
    decoder, xa = encoder_decoder.decoder, encoder_decoder.encode(torch.rand(1, 3, 16, 16))
    ids = torch.randint(0, 40, (1, 6))
    _, past = chunked_logits(decoder, ids[:, :5], xa, [])
    before = {linear: kv.clone() for linear, kv in past.self_kv.items()}
    with pytest.raises(KeyboardInterrupt), install_kv_cache_hooks(decoder, past):
        decoder(ids[:, 5:], xa)
        with pytest.raises(RuntimeError, match="another cache is installed"), install_kv_cache_hooks(decoder):
            pass
        raise KeyboardInterrupt
    assert count_hooks(decoder) == 0
    assert past.length == 5 and all(torch.equal(kv, before[linear]) for linear, kv in past.self_kv.items())


def test_the_hook_cache_derives_start_pos_and_refuses_another_one(encoder_decoder):
    decoder, xa = encoder_decoder.decoder, encoder_decoder.encode(torch.rand(2, 3, 16, 16))
    ids = torch.randint(0, 40, (2, 7))
    whole = decoder(ids, xa)
    with install_kv_cache_hooks(decoder) as cache:
        pieces = [decoder(ids[:, :4], xa), decoder(ids[:, 4:5], xa), decoder(ids[:, 5:6], xa, 5)]
        for call in (
            lambda: decoder(ids[:, 6:], xa, start_pos=0),
            lambda: decoder(ids[:, 6:], xa, 5),
            lambda: decoder(x=ids[:, 6:], xa=xa, start_pos=7),
        ):
            with pytest.raises(InputError, match=r"start_pos=\d, but the cache holds 6 tokens; leave start_pos out"):
                call()
        pieces.append(decoder(x=ids[:, 6:], xa=xa))
        assert cache.length == 7
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inference", [True, False])
def test_the_hook_cache_refuses_another_image(encoder_decoder, inference):
    """In the same context, in one that continues a past, after `rows`, and after a change in place."""
    decoder = encoder_decoder.decoder
    with torch.inference_mode(inference):
        xa, other = encoder_decoder.encode(torch.rand(2, 3, 16, 16)).split(1)
        ids = torch.randint(0, 40, (2, 5))
        with install_kv_cache_hooks(decoder) as past:
            decoder(ids[:, :4], xa)
            for wrong in (other, torch.cat([xa, other]), xa.double()):
                with pytest.raises(InputError, match=r"xa \(\d, 16, 24\) is not the cached one; .* without `past`"):
                    decoder(ids[:, 4:], wrong)
            expected = decoder(ids[:, 4:], xa.clone())  # equal values are the same image
        assert past.length == 5
        with install_kv_cache_hooks(decoder, past.rows(torch.tensor([1, 1]))), pytest.raises(InputError, match="xa"):
            decoder(ids[:, 4:], other)
        torch.testing.assert_close(expected, decoder(ids, xa)[:, 4:], atol=1e-4, rtol=1e-4)
        xa = xa.clone()
        with install_kv_cache_hooks(decoder):
            decoder(ids, xa)
            xa += 1
            with pytest.raises(InputError, match="xa"):
                decoder(ids[:, :1], xa)


@torch.enable_grad()
def test_what_the_hook_cache_holds_is_detached(encoder_decoder):
    """Gradients of a call are those of its new tokens; the past and the image's keys and values are constants."""
    decoder, xa = encoder_decoder.decoder, torch.randn(1, 5, 24, requires_grad=True)
    ids = torch.randint(0, 40, (1, 6))
    with install_kv_cache_hooks(decoder) as cache:
        (prompt_grad,) = torch.autograd.grad(decoder(ids[:, :4], xa).square().sum(), xa)
        expected = decoder(ids[:, 4:], xa)
        assert not any(kv.requires_grad for kv in [*cache.self_kv.values(), *cache.cross_kv.values(), cache.xa])
        (key_grad,) = torch.autograd.grad(expected.square().sum(), decoder.blocks[0].attn.key.weight)
    assert prompt_grad.any() and key_grad.any()
    torch.testing.assert_close(expected, decoder(ids, xa)[:, 4:], atol=1e-4, rtol=1e-4)


def test_a_failed_call_leaves_the_hook_cache_as_it_was(encoder_decoder):
    """The call may be repeated in the same context. Blocks and `forward` called past the decoder's hooks raise."""
    decoder, xa = encoder_decoder.decoder, encoder_decoder.encode(torch.rand(1, 3, 16, 16))
    ids = torch.randint(0, 40, (1, 6))

    def fail(module, args):
        raise ArithmeticError

    with install_kv_cache_hooks(decoder) as cache:
        for start, stop in ((0, 4), (4, 6)):
            interrupt = decoder.blocks[-1].mlp.register_forward_pre_hook(fail)
            with pytest.raises(ArithmeticError):
                decoder(ids[:, start:stop], xa if start else xa + 1)
            interrupt.remove()
            assert cache.length == start
            logits = decoder(ids[:, start:stop], xa)
        for call in (lambda: decoder.forward(ids[:, :1], xa, 6), lambda: decoder.blocks[0](torch.randn(1, 1, 24), xa)):
            with pytest.raises(RuntimeError, match="call the decoder itself"):
                call()
    torch.testing.assert_close(logits, decoder(ids, xa)[:, 4:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("use_kv_cache", [True, False])
def test_counts_out_of_range_raise_with_their_numbers(encoder_decoder, use_kv_cache):
    images, ids = torch.rand(1, 3, 16, 16), torch.randint(0, 40, (1, 4))
    for options, shape in (({"max_new_tokens": 61}, (1, 61)), ({"max_new_tokens": 0, "n_samples": 3}, (3, 0))):
        assert encoder_decoder.generate(ids, images, **options, use_kv_cache=use_kv_cache).shape == shape
    for options, message in (
        ({"max_new_tokens": 62}, "65 tokens exceed the decoder's n_ctx=64"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 is negative"),
        ({"n_samples": 0}, "n_samples=0 is less than 1"),
    ):
        with pytest.raises(ValueError, match=message):
            encoder_decoder.generate(ids, images, **options, use_kv_cache=use_kv_cache)


@torch.enable_grad()
def test_the_loss_is_the_mean_cross_entropy_of_the_targets_and_trains_every_weight(encoder_decoder):
    model, images, ids = copy.deepcopy(encoder_decoder), torch.rand(2, 3, 16, 16), torch.randint(0, 40, (2, 5))
    targets = ids.roll(-1, 1)
    targets[0, 3:] = -100
    logits, loss = model(ids, images, targets)
    log_probs = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(loss, -log_probs[targets >= 0].mean())
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
