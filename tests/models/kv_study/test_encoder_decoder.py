"""The encoder-decoder's answers, and what its two caches, explicit and by hooks, share, refuse and restore."""

from contextlib import contextmanager

import pytest
import torch

from models.common.errors import InputError
from models.common.options import SamplingParams
from models.kv_study.hook_cache import install_kv_cache_hooks
from models.kv_study.text_decoder import TextPrefillState


def assert_close(a, b):
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.fixture
def decoder(encoder_decoder):
    return encoder_decoder.decoder


@pytest.fixture
def xa(encoder_decoder):
    return encoder_decoder.encode(torch.rand(1, 3, 16, 16))


def test_reordered_beams_match_a_fresh_prefill_and_share_the_image(decoder, xa):
    ids, order, new = torch.randint(0, 40, (3, 6)), torch.tensor([2, 0, 0]), torch.randint(0, 40, (3, 1))
    with install_kv_cache_hooks(decoder) as hooked:
        decoder(ids, xa)
    _, state = decoder.forward_cached(ids, TextPrefillState(decoder.project_cross_kv(xa)))
    with install_kv_cache_hooks(decoder, hooked.rows(order)):
        by_hooks = decoder(new, xa, start_pos=6)
    x, _ = decoder.forward_cached(new, state.rows(order))
    for cache in (hooked, state):
        assert list(map(id, cache.rows(order).cross_kv)) == list(map(id, cache.cross_kv)), "not copied"
    expected = decoder(torch.cat([ids[order], new], 1), xa)[:, -1:]
    assert_close(by_hooks, expected)
    assert_close(decoder.logits(x), expected)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1}, {"repetition_penalty": 5.0}], ids=str)
def test_generate_returns_the_same_ids_with_and_without_cache(encoder_decoder, sampling):
    ids = torch.randint(0, 40, (6, 4))  # two about each image
    options = {"max_new_tokens": 20, "sampling": SamplingParams(**sampling), "eos_token_id": 7}
    for images in torch.rand(2, 3, 3, 16, 16):  # of which nothing is carried over to the next
        cached = encoder_decoder.generate(ids, images, **options)
        assert torch.equal(cached, encoder_decoder.generate(ids, images, **options, use_kv_cache=False))
    for _ in range(2):  # put into the prompt what is chosen; the choice depends on its last token
        ids[:, 0] = encoder_decoder.generate(ids, images, max_new_tokens=1)[:, 0]
    penalty = SamplingParams(repetition_penalty=1e9)  # counts the prompt, too
    penalized = encoder_decoder.generate(ids, images, max_new_tokens=1, sampling=penalty)
    assert not (penalized == ids).any()


@pytest.mark.parametrize("n", [1, 4])
def test_an_image_is_projected_once_for_any_number_of_tokens_and_prompts(encoder_decoder, n):
    """Two images of 16 patches are 32 rows per cross-attention projection; each token but the last is one row."""
    images, ids = torch.rand(2, 3, 16, 16), torch.randint(0, 40, (2 * n, 4))
    for attn, expected in (("cross_attn", 2 * 16), ("attn", 2 * n * (4 + 9))):
        for kind in ("key", "value"):
            rows = []
            linear = getattr(getattr(encoder_decoder.decoder.blocks[1], attn), kind)
            hook = linear.register_forward_hook(lambda linear, args, out, rows=rows: rows.append(out[..., 0].numel()))
            encoder_decoder.generate(ids, images, max_new_tokens=10)
            hook.remove()
            assert sum(rows) == expected


@pytest.mark.parametrize("use_kv_cache", [True, False])
def test_counts_out_of_range_raise_with_their_numbers(encoder_decoder, use_kv_cache):
    images, ids = torch.rand(1, 3, 16, 16), torch.randint(0, 40, (1, 4))
    for n in (61, 0):
        assert encoder_decoder.generate(ids, images, max_new_tokens=n, use_kv_cache=use_kv_cache).shape == (1, n)
    for n, message in ((62, "65 tokens exceed the decoder's n_ctx=64"), (-1, "max_new_tokens=-1 is negative")):
        with pytest.raises(ValueError, match=message):  # before any work
            next(encoder_decoder.stream(ids, images, max_new_tokens=n, use_kv_cache=use_kv_cache))


@pytest.mark.parametrize("inference", [True, False])
def test_the_hook_cache_derives_start_pos_and_refuses_what_does_not_continue_it(decoder, xa, inference):
    ids = torch.randint(0, 40, (1, 7))
    with torch.inference_mode(inference), install_kv_cache_hooks(decoder) as cache:
        xa = xa.clone()
        other, kept = xa.flip(1), xa.clone()
        pieces = [decoder(ids[:, :4], xa), decoder(ids[:, 4:5], kept), decoder(ids[:, 5:6], xa, 5)]
        for call, message in (
            (lambda: decoder(ids[:, 6:], xa, 5), "start_pos=5, but the cache holds 6 tokens; leave start_pos out"),
            (lambda: decoder(x=ids[:, 6:], xa=xa, start_pos=7), "start_pos=7, but the cache holds 6"),
            (lambda: decoder(ids[:, 6:], other), r"xa \(1, 16, 24\) is not the cached one; .* without `past`"),
            (lambda: decoder(ids[:, 6:], torch.cat([xa, other])), r"xa \(2, 16, 24\) is not the cached one"),
            (lambda: decoder(ids[:, 6:], xa.double()), "xa"),
            (lambda: decoder(ids[:, 6:], xa.add_(1)), "xa"),
        ):
            with pytest.raises(InputError, match=message):
                call()
        pieces.append(decoder(x=ids[:, 6:], xa=kept))
        assert cache.length == 7
    assert_close(torch.cat(pieces, 1), decoder(ids, kept))


@contextmanager
def failing(module):
    hook = module.register_forward_pre_hook(lambda module, args: 1 // 0)
    with pytest.raises(ArithmeticError):
        yield
    hook.remove()


def test_a_failed_call_leaves_cache_and_past_as_they_were_and_hooks_are_removed(decoder, xa):
    ids = torch.randint(0, 40, (1, 6))
    with install_kv_cache_hooks(decoder) as past:
        decoder(ids[:, :3], xa)
    before = {linear: kv.clone() for linear, kv in past.self_kv.items()}
    with pytest.raises(KeyboardInterrupt), install_kv_cache_hooks(decoder, past) as cache:
        for start, stop in ((3, 4), (4, 6)):
            with failing(decoder.blocks[-1].mlp):
                decoder(ids[:, start:stop], xa)
            assert cache.length == start
            logits = decoder(ids[:, start:stop], xa)
        for call, message in (
            (lambda: decoder.forward(ids[:, :1], xa, 6), "call the decoder itself"),
            (lambda: decoder.project_cross_kv(xa), "call the decoder itself"),
            (lambda: install_kv_cache_hooks(decoder).__enter__(), "another cache is installed"),
        ):
            with pytest.raises(RuntimeError, match=message):
                call()
        raise KeyboardInterrupt
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in decoder.modules())
    assert past.length == 3 and all(torch.equal(kv, before[linear]) for linear, kv in past.self_kv.items())
    assert_close(logits, decoder(ids, xa)[:, 4:])


@torch.enable_grad()
def test_what_the_hook_cache_holds_is_detached(decoder):
    """Gradients of a call are those of its new tokens; the past and the image's keys and values are constants."""
    xa, ids = torch.randn(1, 5, 24, requires_grad=True), torch.randint(0, 40, (1, 6))
    with install_kv_cache_hooks(decoder) as cache:
        (prompt_grad,) = torch.autograd.grad(decoder(ids[:, :4], xa).square().sum(), xa)
        loss = decoder(ids[:, 4:], xa).square().sum()
        assert not any(kv.requires_grad for kv in [*cache.self_kv.values(), *cache.cross_kv.values(), cache.xa])
        (key_grad,) = torch.autograd.grad(loss, decoder.blocks[0].attn.key.weight)
    assert prompt_grad.any() and key_grad.any()
