"""Beam search on a cache finds what a plain beam search by Whisper's rules finds without one."""

import math

import pytest
import torch

from models.kv_study.beam_search import Hypothesis, beam_search, generate

EOS = 7


def plain_beam_search(next_logits, n_beams, max_new_tokens, eos):
    """The rules in lists, without a cache: next_logits of all new ids so far. Returns (ids, log_prob) in any order."""
    beams, finished = [((), 0.0)], []
    for _ in range(max_new_tokens):
        scored = []
        for ids, total in beams:
            log_probs = next_logits(ids).log_softmax(-1).tolist()
            scored += [(total + log_prob, ids, token) for token, log_prob in enumerate(log_probs)]
        beams = []
        for total, ids, token in sorted(scored, reverse=True):
            if token == eos:
                finished.append((ids, total))
            else:
                beams.append(((*ids, token), total))
            if len(beams) == n_beams:
                break
        if len(finished) >= n_beams:
            break
    finished = finished[:n_beams]
    return finished + beams[: n_beams - len(finished)]


def assert_same(hypotheses, expected):
    assert {h.ids for h in hypotheses} == {ids for ids, _ in expected}
    log_probs = dict(expected)
    assert all(math.isclose(h.log_prob, log_probs[h.ids], abs_tol=1e-3) for h in hypotheses)


@pytest.fixture(scope="module")
def captioner(tiny_model):
    model = tiny_model(seed=8)
    ids = torch.tensor([[5, 3, 3, 3, 3, 9, 11]])
    return model, ids, torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("n_beams", [1, 4])
@pytest.mark.parametrize("kind", ["product", "encoder-decoder"])
def test_on_a_cache_it_equals_a_plain_search_without_one(captioner, encoder_decoder, kind, n_beams):
    model, ids, images = captioner
    options = {"n_beams": n_beams, "max_new_tokens": 12, "eos_token_id": EOS}

    def product_logits(new):
        longer = torch.cat([model.embed(ids, images), model.embed_tokens(torch.tensor([new], dtype=torch.long))], 1)
        return model.prefill_embeds(longer)[0][0]

    def twin_logits(new):
        longer = torch.cat([ids, torch.tensor([new], dtype=torch.long)], 1)
        return encoder_decoder.decoder(longer, encoder_decoder.encode(images))[0, -1]

    searched, next_logits = (model, product_logits) if kind == "product" else (encoder_decoder, twin_logits)
    found = generate(searched, ids, images, **options)
    assert_same(found, plain_beam_search(next_logits, n_beams, 12, EOS))
    if n_beams == 1:
        greedy = searched.generate(ids, images, max_new_tokens=12, eos_token_id=EOS)
        assert [*found[0].ids, EOS][:12] == greedy[0].tolist()


@pytest.mark.parametrize("length_penalty", [None, 0.0, 1.0])
@pytest.mark.parametrize("n_beams", [2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_many_ends_are_found_as_by_a_plain_search_and_ranked_by_the_penalty(seed, n_beams, length_penalty):
    logits = 2 * torch.randn(20, 20, 20, generator=torch.Generator().manual_seed(seed))
    logits[..., EOS] += 1.5
    history = [(1, 2)]

    def step(ids, rows):
        nonlocal history
        history = [(history[row][-1], token) for row, token in zip(rows.tolist(), ids.tolist())]
        return torch.stack([logits[pair] for pair in history])

    options = {"n_beams": n_beams, "max_new_tokens": 10, "eos_token_id": EOS, "length_penalty": length_penalty}
    found = beam_search(logits[1, 2][None], step, **options)
    assert_same(found, plain_beam_search(lambda ids: logits[(1, 2, *ids)[-2:]], n_beams, 10, EOS))
    scores = [hypothesis.score(length_penalty) for hypothesis in found]
    assert scores == sorted(scores, reverse=True) and len(found) == n_beams
    short, long = Hypothesis((1,), -2.0), Hypothesis((1, 2, 3, 4), -3.0)
    assert short.score(0.0) > long.score(0.0) and short.score() == Hypothesis((), -2.0).score() == -2.0
    assert (long.score(), long.score(1.0)) == (-3.0 / 4, -3.0 / (9 / 6))
