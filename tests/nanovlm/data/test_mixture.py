"""The order of examples is a pure function of seed and position, shares are kept, and held-out examples stay so."""

import pickle
import random
from collections import Counter
from functools import partial

import pytest
import torch
from PIL import Image

from nanovlm.data import Batches, Mixture, Source, Stream, Subset, split
from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.source import Part
from nanovlm.errors import DataError
from nanovlm.processing.image_loading import augment
from nanovlm.training.loader import load_batches
from support import noise_image


def make_example(record, name):
    """An example whose answer is its record; one with an empty answer if the record is "bad"."""
    return Example([Image.new("RGB", (16, 16))], [("?", "" if record == "bad" else f"{record}")], name)


def source(name, n, **options):
    return Source(name, range(n), make_example, **options)


def stream(name, n):
    return Stream(name, [partial(range, n)], make_example)


def names(mixture, positions):
    return [mixture.example(position).name for position in positions]


def test_every_epoch_shows_each_example_once_in_its_own_order():
    subsets = [Subset(source("a", 7), range(7)), Subset(source("b", 5), [0, 2, 4])]
    everything = {f"a[{i}]" for i in range(7)} | {"b[0]", "b[2]", "b[4]"}
    order = names(Mixture(subsets, 0), range(40))
    epochs = [order[start : start + 10] for start in range(0, 40, 10)]
    assert all(set(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert names(Mixture(subsets, 1), range(10)) != order[:10]


def test_order_is_a_pure_function_of_seed_and_position():
    subsets = [Subset(source("a", 700), range(700), 0.5), Subset(source("b", 50), range(50))]
    subsets.append(Subset(stream("c", 9), (), 0.2))
    order = names(Mixture(subsets, 3), range(2100))
    for position in (2099, 0, 999, 1000, 1001, 17):  # in any order, from a new object
        assert names(Mixture(subsets, 3), [position]) == order[position : position + 1]
    mixture = pickle.loads(pickle.dumps(Mixture(subsets, 3)))
    assert names(mixture, range(500, 600)) == order[500:600] and names(mixture, [3]) == order[3:4]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((None, 0.3, None), (0.4667, 0.3, 0.2333)), ((2, 1, 1), (0.5, 0.25, 0.25)), ((None,) * 3, (4 / 7, 1 / 7, 2 / 7))],
)
def test_shares_hold_all_along(weights, shares):
    subsets = [Subset(source(name, n), range(n), w) for name, n, w in zip("abc", (400, 100, 200), weights)]
    mixture = Mixture(subsets, 0)
    seen = Counter()
    for position in range(7000):
        seen[mixture.example(position).name[0]] += 1
        if position in (699, 1999, 6999):
            for name, share in zip("abc", shares):
                assert abs(seen[name] / (position + 1) - share) < (0.05 if position == 699 else 0.005)
    if weights == (2, 1, 1):  # every group shows all its examples before it repeats one
        first = [name for name in names(mixture, range(1000)) if name[0] == "b"]
        assert {len(set(first[start : start + 100])) for start in (0, 100)} == {100}


@pytest.mark.parametrize(
    ("weights", "message"),
    [((1.0, None), "leave nothing for b"), ((0.0001, 1), "the share of a is less than one example in 1000")],
)
def test_impossible_shares_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        Mixture([Subset(source(name, 5), range(5), w) for name, w in zip("ab", weights)], 0)


@pytest.mark.parametrize("endless", [stream("a", 5), source("a", 5, endless=True)])
def test_data_without_an_end_need_a_share_unless_they_are_alone(endless):
    with pytest.raises(DataError, match="a has no size .* as in a@0.3"):
        Mixture([Subset(endless, range(5)), Subset(source("b", 5), range(5), 0.5)], 0)
    assert set(names(Mixture([Subset(endless, range(5))], 0), range(5))) == {f"a[{i}]" for i in range(5)}


def keys(subset):
    return {subset.source.key(i) for i in subset.indices}


def test_held_out_fraction_stays_when_data_grow_or_move():
    small, large = (source("mine", n, keys=[f"{i}.png" for i in range(n)]) for n in (2000, 3000))
    moved = source("elsewhere", 2000, keys=[f"{i}.png" for i in range(2000)])
    (train,), (held_out,) = split([(small, None)], 0.1)
    assert not keys(train) & keys(held_out) and len(keys(train) | keys(held_out)) == 2000
    assert 150 < len(held_out) < 250
    (train_of_large,), (held_out_of_large,) = split([(large, None)], 0.1)
    assert keys(held_out) <= keys(held_out_of_large) and keys(train) <= keys(train_of_large)
    assert keys(split([(moved, None)], 0.1)[1][0]) == keys(held_out)
    assert keys(held_out) < keys(split([(small, None)], 0.2)[1][0])


def test_examples_of_one_image_are_held_out_together():
    pairs = source("c", 40, keys=[f"{i // 2}.png" for i in range(40)])  # two questions per image
    (train,), (held_out,) = split([(pairs, None)], 5)
    assert len(held_out) == 6 and not keys(train) & keys(held_out)


def test_endless_source_is_not_held_out():
    sources = [(source("drawn", 5000, endless=True), 0.2), (source("mine", 20), None)]
    for validation in (0.5, 4):
        train, held_out = split(sources, validation)
        assert [subset.source.path for subset in held_out] == ["mine"] and len(train[0]) == 5000
    assert len(held_out[0]) == 4


@pytest.mark.parametrize(("examples", "expected"), [(99, 0), (100, 10), (200, 10), (999, 49), (5000, 200)])
def test_a_twentieth_is_held_out_by_default_but_none_of_few(examples, expected):
    sources = [(source("mine", examples - 9), None), (source("more", 9), None), (source("drawn", 9, endless=True), 0.2)]
    by_default, same = (
        [[list(subset.indices) for subset in side] for side in split(sources, n)] for n in (None, expected)
    )
    assert by_default == same and sum(map(len, same[1])) == expected


@pytest.mark.parametrize(
    "sources",
    [
        [source("mine", 500), stream("a", 500)],
        [source("mine", 500), source("tiny", 1, keys=["292"])],  # which has one of the lowest hashes
        [source("mine", 500, keys=["one.png"] * 500)],
        [source("mine", 500, keys=[f"{i // 125}.png" for i in range(500)])],
    ],
    ids=["stream", "source of one example", "one image", "four images"],
)
def test_nothing_is_held_out_by_default_where_too_little_would_be_left(sources):
    train, held_out = split([(one, None) for one in sources], None)
    assert held_out == [] and len(train[0]) == 500


class Shard:
    """The rows of a shard, whose readings are counted."""

    def __init__(self, rows):
        self.rows, self.readings = rows, 0

    def __call__(self):
        self.readings += 1
        return iter(self.rows)


@pytest.mark.parametrize("sizes", [[1200], [5, 5, 5], [6, 6, 6, 6, 6], [4] * 6], ids=str)
@pytest.mark.parametrize("n_parts", [1, 2, 3])
def test_the_parts_of_a_stream_show_every_row_once_and_read_only_their_shards(sizes, n_parts):
    shards = [Shard([f"{i}.{k}" for k in range(size)]) for i, size in enumerate(sizes)]
    mixture = Mixture([Subset(Stream("a", shards, make_example), ())], 0)
    rows = [f"{i}.{k}" for i, size in enumerate(sizes) for k in range(size)]
    shown, readings = [], []
    for part in range(n_parts):
        # leftover shards are divided row by row
        left_over = len(sizes) % n_parts
        whole = [size for i, size in enumerate(sizes[: len(sizes) - left_over]) if i % n_parts == part]
        strided = [len(range(part, size, n_parts)) for size in sizes[len(sizes) - left_over :]]
        n = sum(whole + strided)
        order = [mixture.example(i, part=Part(part, n_parts)).qa_pairs[0][1] for i in range(2 * n)]
        assert sorted(order[:n]) == sorted(order[n:]), "each epoch shows the same rows"
        assert n < 100 or order[n:][:99] != order[:99] != rows[part::n_parts][:99], "in an order of its own"
        shown += order[:n]
        readings.append([shard.readings for shard in shards])
        for shard in shards:
            shard.readings = 0
    assert sorted(shown) == sorted(rows)
    for i in range(len(sizes) - len(sizes) % n_parts):
        assert [counts[i] for counts in readings] == [2 * (i % n_parts == part) for part in range(n_parts)]


def stream_batches(processor, n_parts):
    """Batches of a stream with a share and of a source; their answers are the records."""
    streamed = Stream("s", [partial(range, 100 * i, 100 * i + 9) for i in range(4)], make_example)
    subsets = [Subset(streamed, (), 0.5), Subset(source("a", 24), range(24))]
    return Batches(Mixture(subsets, 1), processor, 2, n_parts=n_parts, augment=0.2)


@pytest.mark.full  # worker processes
def test_a_batch_of_a_stream_is_a_function_of_its_number_in_every_process(tiled):
    """Two ranks with two workers each, resumed in the middle of an epoch, and batches made here in any order."""
    expected = [stream_batches(tiled[1], 4)(number) for number in range(16)]
    for start in (0, 6, 10):  # a resumed rank's first batch may be of either worker's part
        for rank in (0, 1):
            numbers = range(start + rank, 16, 2)
            with load_batches(stream_batches(tiled[1], 4), numbers, 2) as loaded:
                for number, batch in zip(numbers, loaded, strict=True):
                    assert all(torch.equal(batch[name], tensor) for name, tensor in expected[number].items())


def test_a_source_beside_a_stream_shows_every_example_once_an_epoch(tiled):
    batches = stream_batches(tiled[1], 4)
    names = []
    for number in range(48):
        step, part = divmod(number, 4)
        examples = [batches.mixture.example(2 * step + b, part=Part(part, 4)) for b in range(2)]
        names += [example.name for example in examples]
    of_source = [name for name in names if name.startswith("a[")]
    assert len(set(of_source[:24])) >= 20 and len(set(of_source)) == 24
    assert len(of_source) == pytest.approx(48, abs=8)


@pytest.mark.parametrize(
    ("n", "part", "message"),
    [(0, Part(), "a has no example to learn from$"), (2, Part(2, 3), "from for process 3 of the 3 that read it")],
)
def test_a_stream_or_part_without_rows_is_refused(n, part, message):
    with pytest.raises(DataError, match=message):
        Mixture([Subset(stream("a", n), ())], 0).example(0, part=part)


def test_stream_is_split_by_the_keys_of_its_rows():
    (train,), (held_out,) = split([(stream("a", 1000), 0.5)], 0.1)
    learned, out = ({key for key, _ in subset.source.keyed_rows()} for subset in (train, held_out))
    assert learned | out == {str(number) for number in range(1000)} and not learned & out and 70 < len(out) < 130
    (whole,), nothing = split([(stream("a", 1000), None)], 0)
    assert len(list(whole.source.keyed_rows())) == 1000 and nothing == []


@pytest.mark.parametrize(
    ("sources", "validation", "message"),
    [
        ([source("a", 5)], 5, "5 of 5 examples leaves none"),
        ([source("a", 5), stream("b", 5)], 5, "name a fraction"),
        ([source("a", 3)], 0.001, "holds nothing out"),
        ([source("a", 1), source("b", 100)], 100, "no example of a to learn from"),
    ],
)
def test_splits_that_leave_nothing_are_refused(sources, validation, message):
    with pytest.raises(DataError, match=message):
        split([(one, None) for one in sources], validation)


def test_batches_are_a_pure_function_and_can_be_pickled(tiled):
    mixture = Mixture([Subset(source("a", 10), range(10)), Subset(stream("b", 10), (), 0.5)], 0)
    batches = Batches(mixture, tiled[1], 3)
    unpickled = pickle.loads(pickle.dumps(batches))
    batches(4)
    torch.testing.assert_close(batches(2), unpickled(2), atol=0, rtol=0)
    assert not torch.equal(batches(2)["input_ids"], batches(3)["input_ids"])


def test_only_images_shown_before_are_changed(tiled):
    image = noise_image(40, 30)
    make = lambda record, name: Example([image], [("?", str(record))], name)  # noqa: E731
    small, endless = Source("small", range(6), make), Source("endless", range(10**6), make, endless=True)
    mixture = Mixture([Subset(small, range(6)), Subset(endless, range(10**6), 0.4)], 0)
    plain, augmented = (Batches(mixture, tiled[1], 1, augment=fraction) for fraction in (0.0, 0.2))
    different = set()
    for position in range(40):
        original, cropped = plain(position)["images"], augmented(position)["images"]
        shown_before = mixture.pick(*mixture.locate(position))[0].path == "small" and mixture.epoch(position) > 0
        assert torch.equal(original, cropped) != shown_before
        assert torch.equal(cropped, augmented(position)["images"]), "a pure function of the position"
        different.add(cropped.numpy().tobytes())
    assert len(different) > 10


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (40, 30), (1000, 7)])
def test_an_image_is_changed_a_little_before_the_color_of_its_corners(size):
    """A bright square in the middle of blue stays bright and near the middle, and all four corners stay blue."""
    image, rng, seen = Image.new("RGB", size, (10, 20, 200)), random.Random(0), set()
    width, height = size
    image.paste((200, 190, 180), (width // 4, height // 4, 3 * width // 4, 3 * height // 4))
    for _ in range(50):
        moved = augment(image, 0.1, rng)
        assert moved.size == size
        if min(size) >= 20:
            (corner,) = {moved.getpixel((x, y)) for x in (0, width - 1) for y in (0, height - 1)}
            middle = moved.getpixel((width // 2, height // 2))
            assert max(abs(a - b) for a, b in zip(corner + middle, (10, 20, 200, 200, 190, 180))) <= 45
            seen.add((corner, middle))
    assert len(seen) > 40 or min(size) < 20
    assert augment(image, 0.0, rng).tobytes() == image.tobytes()


@pytest.mark.parametrize("kind", ["source", "stream"])
def test_bad_example_raises_or_the_next_one_replaces_it(kind, tiled, caplog):
    records = ["bad" if i % 3 == 0 else f"good {i}" for i in range(12)]
    if kind == "source":
        subset = Subset(Source("a", records, make_example), range(12))
    else:
        subset = Subset(Stream("a", [partial(iter, records)], make_example), ())
    mixture = Mixture([subset], 0)
    with pytest.raises(ExampleError, match=r"^a\[\d+\] has an empty answer"):
        Batches(mixture, tiled[1], 12)(0)
    batches, again = (Batches(mixture, tiled[1], 12, skip_errors=True) for _ in range(2))
    first = batches(0)
    assert len(caplog.messages) == 4 and all(line.startswith("skipped: a[") for line in caplog.messages)
    batches(0)
    assert len(caplog.messages) == 4, "each is reported once, not at every epoch"
    assert all(torch.equal(one, other) for one, other in zip(first.values(), again(0).values()))


def test_source_of_bad_examples_only_is_refused(tiled):
    mixture = Mixture([Subset(Source("a", ["bad"] * 9, make_example), range(9))], 0)
    with pytest.raises(DataError, match="100 examples in a row cannot be used"):
        Batches(mixture, tiled[1], 1, skip_errors=True)(0)
