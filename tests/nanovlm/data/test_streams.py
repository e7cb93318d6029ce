"""Streams show every row once an epoch, hold images out, and go on behind a saved state."""

import json
from functools import partial
from itertools import islice

import pytest
import torch

from nanovlm.data import ExampleBatches, Mixture, StreamedSource, Subset
from nanovlm.data.mixture import split
from nanovlm.data.records import example_of_table
from nanovlm.data.source import keys_of
from nanovlm.errors import DataError, TrainingError
from nanovlm.training.loader import load_batches
from support.data import OPTIONS, png

pytestmark = pytest.mark.full


def stream(n=600, n_shards=1):
    import datasets

    images = [png(i % 20) for i in range(n)]  # thirty copies of each
    rows = [{"image": {"bytes": images[i], "path": None}, "text": f"{i}"} for i in range(n)]
    data = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=n_shards).with_format("arrow")
    return StreamedSource("a", data, partial(example_of_table, folder="", features=data.features, options=OPTIONS))


def answers(reader, n):
    return [example.qa_pairs[0][1] for example, _ in islice(reader, n)]


@pytest.mark.parametrize(("n_shards", "n_parts"), [(1, 1), (3, 1), (4, 2), (3, 2), (1, 3)])
def test_the_parts_of_a_stream_show_every_row_once_an_epoch(n_shards, n_parts):
    one, shown = stream(60, n_shards), []
    for part in range(n_parts):
        order = answers(one.read("0", part, n_parts), 120 // n_parts)
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        assert first != second, "in an order of its own"
        assert n_shards % n_parts or sorted(first) == sorted(second), "of the same shards"
        shown += first
    assert sorted(shown) == sorted(map(str, range(60)))


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize("taken", [1, 255, 256, 599, 650])
def test_a_reader_goes_on_behind_a_state_that_went_through_json(taken, n_parts):
    one = stream(600, 2)
    read = list(islice(one.read("0", 0, n_parts), taken + 40))
    state = json.loads(json.dumps(read[taken - 1][1]))
    assert answers(one.read("0", 0, n_parts, state), 40) == answers(read[taken:], 40)


def test_a_stream_holds_out_images_by_their_bytes():
    (train,), (held_out,) = split([(one := stream(), 0.5)], 0.2)
    assert 0 < len(held_out) <= 200 and len(held_out) % 30 == 0
    out = {key for example in held_out for key in keys_of(example, {})}
    learned = {key for example, _ in islice(one.read("0"), 500) for key in keys_of(example, {})}
    assert train.source is one and not out & learned and len(out | learned) == 20
    with pytest.raises(DataError, match="name a fraction"):
        split([(stream(), None)], 5)
    assert split([(stream(), None)], None)[1] == []


def test_a_stream_that_breaks_off_or_is_empty_is_one_line():
    one = stream(9)
    one.hold_out(0.99999, 0)
    with pytest.raises(DataError, match="no example to learn from in part 1 of 1"):
        next(one.read("0"))
    one.rows = one.rows.map(lambda row: 1 / 0)
    with pytest.raises(TrainingError, match="broke off .division by zero.; rerun the same command to resume"):
        next(one.read("0"))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_resume_by_the_state_of_their_loader(tiled, workers):
    def batches():
        return ExampleBatches(Mixture([Subset(stream(100, 2))], 0), tiled[1], 4, n_parts=max(1, workers))

    with load_batches(batches(), range(14), workers) as loaded:
        first = [next(loaded)["input_ids"] for _ in range(6)]
        state = json.loads(json.dumps(loaded.state))
        rest = [batch["input_ids"] for batch in loaded]
    with load_batches(batches(), range(6, 14), workers, state) as loaded:
        again = [batch["input_ids"] for batch in loaded]
    assert len(first) == 6 and all(map(torch.equal, rest, again)) and len(again) == 8
