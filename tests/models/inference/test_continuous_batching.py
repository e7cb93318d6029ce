"""Continuous batching: each request generates what the model generates for its prompt alone."""

from random import Random

import pytest
import torch
from models.inference.requests import PrefillError

from models.decoding import GREEDY, SamplingParams, finish_reason
from models.inference import continuous_batching, serving_caches
from models.inference.continuous_batching import ContinuousBatch
from support.generation import only_row, prompt

few_seeds = pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.full) for n in range(8, 40))]
)
SAMPLINGS = [
    GREEDY,
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=2.0, top_p=0.9, repetition_penalty=1.3, seed=6),
    SamplingParams(frequency_penalty=0.8, presence_penalty=-0.3),
    SamplingParams(temperature=1.5, presence_penalty=2.0, seed=7),
    SamplingParams(repetition_detection=(1, 4, 2)),
]


def alone(model, ids, images=None, **options):
    """What the model generates for one prompt, up to and including the end token."""
    output = model.generate(ids[None], images, **options)[0].tolist()
    eos = options.get("eos_token_id")
    return output[: output.index(eos) + 1] if eos in output else output


def answers(batch, generated=None):
    """Step until no request waits or runs: each key's ids and finish reason, added to those of earlier steps."""
    generated = {} if generated is None else generated
    while batch.waiting or batch.running:
        listen(batch, generated)
    return generated


def listen(batch, generated):
    for output in batch.step():
        ids, ended = generated.setdefault(output.key, ([], []))
        assert not ended, "no token follows the end"
        ids.append(output.token_id)
        ended += [output.finished] * bool(output.finished)


def random_arrivals(rng):

    def row():
        text = "".join(rng.choices("ttti", k=rng.randint(1, 10)))
        return rng.randint(0, 12), text, rng.randint(1, 14), rng.choice(SAMPLINGS)

    return sorted((row() for _ in range(rng.randint(1, 9))), key=lambda row: row[0])


@few_seeds
def test_each_request_generates_what_it_generates_alone(tiny_model, seed):
    rng = Random(seed)
    arrivals, rows, read = random_arrivals(rng), rng.randint(1, 4), rng.choice([1, 24, 2048])
    eos, cancelled = rng.choice([None, rng.randint(4, 39)]), {rng.randint(0, 8): rng.randint(0, 14) for _ in range(2)}
    model, generated, expected = tiny_model(), {}, {}
    batch = ContinuousBatch(model, max_num_seqs=rows, eos_token_id=eos)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous_batching, "MAX_PREFILL_TOKENS", read)
        patch.setattr(serving_caches, "SLOT_CAPACITY_STEP", 4)
        for step in range(15):
            for key, (when, text, n, sampling) in enumerate(arrivals):
                if when == step:
                    row = only_row(prompt(text, seed=key), 0)
                    row["input_ids"] = row["input_ids"][0]
                    options = {"max_new_tokens": n, "sampling": sampling}
                    batch.add(key, **row, **options)
                    expected[key] = alone(model, row["input_ids"], row["images"], **options, eos_token_id=eos), sampling
            for key, when in cancelled.items():
                if when == step:
                    batch.cancel(key)
            assert batch.running <= rows
            listen(batch, generated)
        answers(batch, generated)
    for key, (ids, sampling) in expected.items():
        output, ended = generated.get(key, ([], []))
        if key in cancelled and not ended:
            assert output == ids[: len(output)]
        else:
            assert output == ids and ended == [finish_reason(ids, eos, sampling.repetition_detection)]
            assert len(ids) <= arrivals[key][2]
    assert set(generated) <= set(expected) and batch.running == batch.waiting == 0


def test_a_freed_slot_is_taken_by_a_waiting_request(tiny_model):
    batch = ContinuousBatch(tiny_model(), max_num_seqs=2)
    batch.add("long", torch.arange(4, 9), max_new_tokens=30)
    batch.step()
    for key in range(4):
        batch.add(key, torch.arange(5, 9), max_new_tokens=1)
    for key in range(4):
        assert (batch.waiting, batch.running) == (4 - key, 1)
        assert [output.key for output in batch.step()] == [key, "long"], "no step of the long answer is missed"


def test_a_cancelled_request_frees_its_slot(tiny_model):
    batch = ContinuousBatch(tiny_model(), max_num_seqs=2)
    for key in "abcd":
        batch.add(key, torch.arange(4, 9), max_new_tokens=20)
    batch.step()
    batch.cancel("a"), batch.cancel("c"), batch.cancel("nobody")
    assert (batch.waiting, batch.running) == (1, 1)
    assert {output.key for output in batch.step()} == {"b", "d"}
    batch.add("a", torch.arange(4, 9), max_new_tokens=2)
    assert len(answers(batch)["a"][0]) == 2


@pytest.mark.parametrize(
    ("arguments", "n", "words"),
    [
        (("a", torch.arange(4, 9)), 9, "'a' is the key of a request"),
        (("b", torch.full((60,), 4)), 6, "exceed lm_max_position_embeddings=64"),
        (("b", torch.arange(4, 9)), 0, "max_new_tokens=0 is less than 1"),
        (("b", torch.arange(4, 9)[None]), 9, r"not \(1, 5\)"),
        (("b", torch.arange(4, 9), torch.rand(1, 3, 16, 16)), 9, "holds 0 image tokens, but the images give 4"),
        (("b", torch.full((4,), 3)), 9, "holds 4 image tokens, but the images give 0"),
        (("b", torch.full((4,), 3), torch.zeros(1, 3, 16, 16).byte()), 9, "images are of torch.uint8, not floats"),
    ],
)
def test_impossible_requests_are_refused_when_added(tiny_model, arguments, n, words):
    batch = ContinuousBatch(tiny_model(), max_num_seqs=2)
    batch.add("a", torch.arange(4, 9), max_new_tokens=9)
    with pytest.raises(ValueError, match=words):
        batch.add(*arguments, max_new_tokens=n)
    assert (batch.waiting, batch.running) == (1, 0)


def test_a_batch_has_at_least_one_slot(tiny_model):
    with pytest.raises(ValueError, match="max_num_seqs=0 is less than 1"):
        ContinuousBatch(tiny_model(), max_num_seqs=0)


@pytest.mark.parametrize("full", [False, True])
def test_a_prompt_that_cannot_be_prefilled_fails_alone(tiny_model, full):
    """Unknown ids, images of another size, and a lack of memory fail the one prompt that has them."""

    def refuse(embed, inputs):
        if inputs[0].numel() > 8 and inputs[0].max() == 12:
            raise MemoryError

    model, ids = tiny_model(), torch.arange(4, 9)
    expected = alone(model, ids, max_new_tokens=5)
    if full:  # which takes the plain modules
        model.decoder.token_embedding.register_forward_pre_hook(refuse)
    batch, generated, unread = ContinuousBatch(model, max_num_seqs=4), {}, []
    images = {"image": torch.rand(1, 3, 20, 20)}
    prompts = {"a": ids, "unknown": ids + 40, "image": torch.full((4,), 3), "large": torch.arange(4, 13), "b": ids}
    for key, prompt_ids in prompts.items():
        batch.add(key, prompt_ids, images.get(key), max_new_tokens=5)
    while batch.waiting or batch.running:
        try:
            listen(batch, generated)
        except PrefillError as error:
            unread.append(error.key)
    assert sorted(unread) == ["image", *["large"] * full, "unknown"]
    assert generated["a"][0] == generated["b"][0] == expected


def test_a_slots_old_contents_reach_no_other_request(tiny_model):
    """Not even infinity, which a mask would turn into NaN."""
    model, ids = tiny_model(), torch.arange(4, 9)
    batch = ContinuousBatch(model, max_num_seqs=2)
    batch.add("long", torch.arange(4, 20), max_new_tokens=20)
    batch.add("a", torch.arange(4, 20), max_new_tokens=2)
    batch.step()
    with torch.inference_mode():
        batch._cache.data[:, :, 1] = float("inf")
    batch.cancel("a")
    batch.add("b", ids, max_new_tokens=5)
    assert answers(batch)["b"][0] == alone(model, ids, max_new_tokens=5)


def fail_on(model, token_id, error):
    """Make every decode step raise error whose batch holds a token of this id."""
    embedding = model.decoder.token_embedding.weight[token_id]

    def check(embed, inputs, output):
        if inputs[0].size(1) == 1 and (output == embedding).all(-1).any():
            raise error

    model.decoder.token_embedding.register_forward_hook(check)


@pytest.mark.parametrize("n_others", [0, 1, 4])
def test_a_sequence_that_cannot_be_decoded_ends_alone(tiny_model, n_others):
    model = tiny_model()
    prompts = [torch.arange(4 + i, 12 + i) for i in range(n_others + 1)]
    expected = [alone(model, ids, max_new_tokens=6) for ids in prompts]
    bad = n_others // 2
    poison = next(
        i for i, id in enumerate(expected[bad][:5]) if not any(id in e for k, e in enumerate(expected) if k != bad)
    )
    batch, error = ContinuousBatch(model, max_num_seqs=8), KeyError("no such kernel")
    fail_on(model, expected[bad][poison], error)
    for key, ids in enumerate(prompts):
        batch.add(key, ids, max_new_tokens=6)
    generated = answers(batch)
    assert generated.pop(bad) == ([*expected[bad][: poison + 1], -1], ["error"])
    assert {key: ids for key, (ids, _) in generated.items()} == {k: e for k, e in enumerate(expected) if k != bad}


def test_a_sampling_that_fails_ends_its_sequence_alone(tiny_model):
    def fail(generated, logits):
        raise ZeroDivisionError

    model, ids = tiny_model(), torch.arange(4, 9)
    batch = ContinuousBatch(model, max_num_seqs=4)
    for key, processor in {"a": None, "broken": fail, "b": None}.items():
        batch.add(key, ids, max_new_tokens=5, logits_processor=processor)
    outputs = batch.step()
    assert [(output.key, type(output.error)) for output in outputs if output.error] == [("broken", ZeroDivisionError)]
    assert answers(batch).keys() == {"a", "b"}


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_step_without_memory_loses_no_token(tiny_model, error):
    model, ids = tiny_model(), torch.arange(4, 9)
    expected, full = alone(model, ids, max_new_tokens=5), []

    def refuse(embed, inputs):
        if full and inputs[0].shape == (3, 1):
            raise error

    model.decoder.token_embedding.register_forward_pre_hook(refuse)
    batch, generated = ContinuousBatch(model, max_num_seqs=4), {}
    for key in "ab":
        batch.add(key, ids, max_new_tokens=5)
    listen(batch, generated)
    full.append(True)
    batch.add("c", ids, max_new_tokens=5)
    with pytest.raises(type(error)):
        listen(batch, generated)
    batch.cancel("b")
    assert {key: ids for key, (ids, _) in answers(batch, generated).items()} == {
        "a": expected, "b": expected[:2], "c": expected,
    }  # fmt: skip


def test_logits_processor_sees_its_own_output_and_decides(tiny_model):
    model, seen = tiny_model(), []

    def only_even_ids(generated, logits):
        seen.append(list(generated))
        assert logits.shape == (1, model.cfg.lm_vocab_size)
        odd = torch.arange(logits.size(-1)) % 2 == 1
        return logits.masked_fill(odd, float("-inf"))

    batch = ContinuousBatch(model, max_num_seqs=2)
    batch.add("even", torch.arange(4, 9), max_new_tokens=8, logits_processor=only_even_ids)
    batch.add("any", torch.arange(4, 9), max_new_tokens=8)
    generated = answers(batch)
    assert generated["any"][0] == alone(model, torch.arange(4, 9), max_new_tokens=8)
    even = generated["even"][0]
    assert all(token_id % 2 == 0 for token_id in even) and even != generated["any"][0]
    assert seen == [even[:n] for n in range(8)]
