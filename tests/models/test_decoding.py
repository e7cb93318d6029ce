"""Sampling: the filters keep what those of transformers keep, and tokens are drawn by their probability."""

import random
import re
from itertools import product

import pytest
import torch

from models.common.errors import InputError
from models.common.options import SamplingParams
from models.decoding import TokenSampler, choose_tokens, finish_reason, generate_tokens, trim_repetition

DRAWS = 20_000


def frequencies(sampling, logits):
    ids = choose_tokens(logits.expand(DRAWS, -1), sampling, torch.Generator().manual_seed(0))
    return ids.bincount(minlength=len(logits)) / DRAWS


@pytest.mark.full
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), *product([0.5, 2.0], [0, 1, 3, 99], [0.05, 0.6, 0.9], [0.0, 0.3])],
)
def test_filters_and_frequencies_match_transformers(temperature, top_k, top_p, min_p):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4))
    hf = pytest.importorskip("transformers")
    theirs = [hf.TemperatureLogitsWarper(temperature), hf.TopPLogitsWarper(top_p), hf.MinPLogitsWarper(min_p)]
    theirs = hf.LogitsProcessorList(theirs)
    if top_k:
        theirs.insert(1, hf.TopKLogitsWarper(top_k))
    probs = theirs(None, logits[None].clone())[0].softmax(-1)
    drawn = frequencies(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), logits)
    assert torch.equal(drawn > 0, probs > 0)  # the rarest of them is drawn once in 160
    assert ((drawn - probs).abs() <= 5 * (probs * (1 - probs) / DRAWS).sqrt()).all()


@pytest.mark.parametrize(
    ("probs", "filters", "n_kept"),
    [
        *(
            ([0.25, 0.5, 0.125, 0.125], {"top_p": p}, n)
            for p, n in ((0.5, 1), (0.50001, 2), (0.75, 2), (0.76, 3), (1, 4))
        ),
        ([0.1, 0.2, 0.2, 0.2, 0.2], {"top_k": 3}, 3),  # transformers would keep all that equal the last one kept
        ([0.1, 0.2, 0.2, 0.2, 0.2], {"top_k": 9}, 5),
        ([0.5, 0.25, 0.25], {"min_p": 0.51}, 1),
    ],
)
def test_filters_keep_as_many_tokens_as_defined(probs, filters, n_kept):
    probs = torch.tensor(probs)
    kept = frequencies(SamplingParams(temperature=1, **filters), probs.log()) > 0
    assert kept.sum() == n_kept and (kept.all() or probs[kept].min() >= probs[~kept].max())


@pytest.mark.parametrize("min_p", [0.0, 1e-9])  # the second sorts
def test_without_filters_no_token_is_impossible(monkeypatch, min_p):
    """The sum of 49,152 probabilities passes 1 before the last of them; they are kept all the same."""
    multinomial, seen = torch.multinomial, []
    monkeypatch.setattr(torch, "multinomial", lambda probs, *a, **k: seen.append(probs) or multinomial(probs, *a, **k))
    logits = torch.randn(50, 49152, generator=torch.Generator().manual_seed(0))
    choose_tokens(logits, SamplingParams(temperature=1.0, min_p=min_p))
    assert (seen[0] > 0).all()


@pytest.mark.parametrize(
    ("repetition", "frequency", "presence"),
    [(0.7, 0, 0), (1.3, 0, 0), (10, 0, 0), (1, 0.3, 0), (1, 0, 0.7), (1, 0.2, -0.5), (1, -0.4, 0.1), (1.2, 0.3, 0.4)],
)
def test_penalties_follow_their_definitions(repetition, frequency, presence):
    """Keskar et al.: logits of used tokens are divided by the penalty, or multiplied by it below 0.

    OpenAI: mu[j] -> mu[j] - c[j] * frequency - float(c[j] > 0) * presence, c counting the generated tokens.
    """
    rows = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    prompt = torch.tensor([[1, 1, 5], [0, 11, -1], [7, 7, 7]])
    sampling = SamplingParams(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    sampler = TokenSampler(sampling, prompt=prompt)
    generated = torch.stack(list(generate_tokens(rows, lambda ids: rows, sampler, 25)), dim=1).tolist()
    for logits, asked, ids in zip(rows.tolist(), prompt.tolist(), generated):
        for step, token_id in enumerate(ids):
            before = ids[:step]
            mu = [
                x * (1 if j not in before + asked else 1 / repetition if x > 0 else repetition)
                - before.count(j) * frequency
                - (j in before) * presence
                for j, x in enumerate(logits)
            ]
            assert mu[token_id] == pytest.approx(max(mu), abs=1e-5)


def test_several_end_tokens_and_a_logits_processor():
    logits = torch.tensor([[5.0, 4, 3, 2], [1.0, 2, 3, 4]])
    sampler = TokenSampler(eos_token_id=(2, 0), logits_processor=lambda x: x.index_fill(1, torch.tensor([3]), -9))
    assert sampler(logits).tolist() == [2, 2], "id 3 is excluded, and 0 ends as 2 does"
    assert [ids.tolist() for ids in generate_tokens(logits, lambda ids: logits, sampler, 9)] == [[2, 2]]


SURE = ({}, {"temperature": 1e-6}, {"temperature": 1e-30}, *({"temperature": 5.0, name: value} for name, value in (
    ("top_k", 1), ("top_p", 1e-9), ("min_p", 1.0),
)))  # fmt: skip


@pytest.mark.parametrize("sampling", SURE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_always_stays(sampling, dtype):
    logits = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(50)]).to(dtype)
    assert torch.equal(choose_tokens(logits, SamplingParams(**sampling)), logits.argmax(-1))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("repetition_penalty", [0.0, -1.0, 5e-324, 1e300, float("inf"), float("nan")]),
        ("frequency_penalty", [-2.1, 2.1, float("nan")]),
        ("presence_penalty", [-2.1, 2.1, float("nan")]),
        ("temperature", ["hot", -0.1, 1e-320, 1e300, float("inf"), float("nan")]),
        ("top_k", [-1, 1.5, "3"]),
        ("top_p", [0.0, 1e-320, 1.01, float("nan")]),
        ("min_p", [-0.01, 1.01, float("nan")]),
        ("seed", [-1, 2**63, 1.0]),
        ("repetition_detection", [(1, 2), (0, 2, 3), (3, 2, 2), (1, 2, 1), (1, 2, -1), (1, 8, 2.0)]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, values):
    for value in values:
        with pytest.raises(InputError, match="^" + re.escape(f"{name}={value} must be ")):
            SamplingParams(**{name: value})


def generate(sampling, steps, eos=None):
    sampler, rest = TokenSampler(sampling, eos), iter(steps[1:])
    stream = generate_tokens(steps[0], lambda ids: next(rest), sampler, len(steps))
    return torch.stack(list(stream), dim=1).tolist()


def test_a_cycle_is_found_and_trimmed_as_defined():
    choose, seen = random.Random(0), set()
    for _ in range(5000):
        shortest, longest, count = choose.randint(1, 3), choose.randint(3, 6), choose.randint(2, 4)
        ids = choose.choices(range(2), k=choose.randint(0, 30))
        lengths = [
            n for n in range(shortest, longest + 1) if len(ids) >= n * count and ids[-n:] * count == ids[-n * count :]
        ]
        kept = trim_repetition(ids, (shortest, longest, count))
        assert kept == ids[: len(kept)] and (len(kept) < len(ids)) == bool(lengths)
        if lengths:  # one cycle is kept, and the tokens before it do not belong to the repetition
            n = min(
                k for k in range(1, longest + 1) if (kept[-k:] * len(ids))[: len(ids) - len(kept)] == ids[len(kept) :]
            )
            assert len(kept) == n or ids[len(kept) - n - 1] != ids[len(kept) - 1]
        seen.add(len(lengths))
    assert seen >= {0, 1, 2, 3}


def test_a_row_that_repeats_itself_ends_and_the_others_go_on():
    detection = (1, 4, 3)
    loop, varied = [7, 1, 2, 1, 2, 1, 2, 1, 2, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8, 2]
    steps = torch.nn.functional.one_hot(torch.tensor([loop, varied]), 10).float().transpose(0, 1)
    assert generate(SamplingParams(), steps, eos=9) == [loop, varied]
    rows = generate(SamplingParams(repetition_detection=detection), steps, eos=9)
    assert rows == [[7, 1, 2, 1, 2, 1, 2, 9, 9, 9], varied]
    assert [finish_reason(row, 9, detection) for row in [*rows, [1, 2, 9]]] == ["repetition", "length", "stop"]
    assert trim_repetition(rows[0][:7], detection) == [7, 1, 2]
    alone = generate(SamplingParams(repetition_detection=detection), steps[:, :1])  # without an end token
    assert alone == [loop[:7]]
