"""A packed batch has the losses and gradients of its samples alone, with less padding."""

import random

import pytest
import torch

from nanovlm.data.examples import EncodedExample, Example, collate, encode, pack
from support import noise_image

PAIRS = [("What is this?", "A red star."), ("How many stars are there? " * 3, "one"), ("?", "-"), ("Is it?", "yes")]
EXAMPLES = [
    Example([noise_image(16, 16, 0)], PAIRS),
    Example([], PAIRS[:2]),
    Example([noise_image(30, 48, 1)], PAIRS[1:]),
    Example([noise_image(30, 14, 2), noise_image(16, 16, 3)], PAIRS[:2]),
    Example([], PAIRS[3:]),
    Example([noise_image(16, 16, 4)], PAIRS[3:]),
]


@pytest.fixture(scope="module")
def rows(tiled):
    return [encode(example, tiled[1]) for example in EXAMPLES]


def plain(length):
    return EncodedExample([7] * length, [-100] * (length - 1) + [8], [1] * length, [])


@pytest.mark.parametrize("length", [10**6, 150, 1])
def test_packed_loss_and_gradients_equal_those_of_the_samples_alone(tiled, rows, length):
    model, _ = tiled
    batch = collate(pack(rows, length))
    assert len(batch["input_ids"]) in {10**6: [1], 150: [2, 3], 1: [len(rows)]}[length]
    model.zero_grad()
    _, loss = model(**batch)
    loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    count, total = sum(t != -100 for row in rows for t in row.targets), 0
    for row in rows:
        alone = {"input_ids": [row.ids], "targets": [row.targets], "attention_mask": [row.mask]}
        images = torch.cat(row.images) if row.images else None
        _, one = model(**{name: torch.tensor(value) for name, value in alone.items()}, images=images)
        one = one * sum(t != -100 for t in row.targets) / count
        one.backward()
        total += one.item()
    assert loss.item() == pytest.approx(total, abs=1e-5)
    alone = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)
    model.zero_grad()


@pytest.mark.parametrize("seed", range(20))
def test_packing_loses_nothing_and_keeps_the_limit(seed):
    rng = random.Random(seed)
    lengths, limit = rng.choices(range(1, 101), k=rng.randint(1, 40)), rng.randint(1, 120)
    packed = pack([plain(n) for n in lengths], limit)
    assert sum(len(row.ids) for row in packed) == sum(lengths)
    assert sum(row.targets.count(8) for row in packed) == len(lengths)
    for row in packed:
        assert len(row.ids) == len(row.targets) == len(row.mask)
        assert len(row.ids) <= limit or row.targets.count(8) == 1
    short = [row for row in packed if len(row.ids) <= limit]
    for i, row in enumerate(short):
        for other in short[:i]:
            assert len(row.ids) + len(other.ids) > limit, "two that would fit together"


def test_pairs_that_fill_a_row_are_packed_together():
    lengths = [n for pair in range(1, 40) for n in (pair, 100 - pair)]
    random.Random(0).shuffle(lengths)
    assert [len(row.ids) for row in pack([plain(n) for n in lengths], 100)] == [100] * 39
