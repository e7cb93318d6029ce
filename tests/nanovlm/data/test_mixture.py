"""Which example stands where is a pure function, shares are kept, and what is held out stays so."""

import pickle
import random
from collections import Counter
from functools import partial

import pytest
import torch
from PIL import Image

from nanovlm.data import Batches, Mixture, Source, Stream, Subset, split
from nanovlm.data.examples import Example, ExampleError
from nanovlm.errors import DataError
from nanovlm.image_processing import random_crop


def numbered(record, name):
    """An example that is only its name, and bad if its record says so."""
    return Example([Image.new("RGB", (16, 16))], [("?", "" if record == "bad" else f"{record}")], name)


def source(name, n, **options):
    return Source(name, range(n), numbered, **options)


def always(row):
    return True


def stream(name, n):
    return Stream(name, partial(range, n), numbered, always)


def names(mixture, places):
    return [mixture.example(place).name for place in places]


def test_every_epoch_shows_each_example_once_in_an_order_of_its_own():
    parts = [Subset(source("a", 7), range(7)), Subset(source("b", 5), [0, 2, 4])]
    everything = {f"a[{i}]" for i in range(7)} | {"b[0]", "b[2]", "b[4]"}
    order = names(Mixture(parts, 0), range(40))
    epochs = [order[start : start + 10] for start in range(0, 40, 10)]
    assert all(set(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert names(Mixture(parts, 1), range(10)) != order[:10]


def test_the_order_is_a_pure_function_of_seed_and_place():
    parts = [Subset(source("a", 700), range(700), 0.5), Subset(source("b", 50), range(50)), Subset(stream("c", 9), (), 0.2)]
    order = names(Mixture(parts, 3), range(2100))
    for place in (2099, 0, 999, 1000, 1001, 17):  # asked for in any order, by somebody new or not
        assert names(Mixture(parts, 3), [place]) == order[place : place + 1]
    mixture = pickle.loads(pickle.dumps(Mixture(parts, 3)))
    assert names(mixture, range(500, 600)) == order[500:600] and names(mixture, [3]) == order[3:4]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((None, 0.3, None), (0.4667, 0.3, 0.2333)), ((2, 1, 1), (0.5, 0.25, 0.25)), ((None,) * 3, (4 / 7, 1 / 7, 2 / 7))],
)
def test_shares_are_kept_all_along(weights, shares):
    parts = [Subset(source(name, n), range(n), w) for name, n, w in zip("abc", (400, 100, 200), weights)]
    mixture = Mixture(parts, 0)
    seen = Counter()
    for place in range(7000):
        seen[mixture.example(place).name[0]] += 1
        if place in (699, 1999, 6999):
            for name, share in zip("abc", shares):
                assert abs(seen[name] / (place + 1) - share) < (0.05 if place == 699 else 0.005)
    if weights == (2, 1, 1):  # and every group goes through all it has before it repeats
        first = [name for name in names(mixture, range(1000)) if name[0] == "b"]
        assert {len(set(first[start : start + 100])) for start in (0, 100)} == {100}


@pytest.mark.parametrize(
    ("weights", "words"),
    [((1.0, None), "leave nothing for b"), ((0.0001, 1), "the share of a is less than one example in 1000")],
)
def test_shares_that_cannot_be_kept_are_refused(weights, words):
    with pytest.raises(DataError, match=words):
        Mixture([Subset(source(name, 5), range(5), w) for name, w in zip("ab", weights)], 0)


def test_a_stream_needs_a_share_unless_it_is_alone():
    with pytest.raises(DataError, match="a has no size .* as in a@0.3"):
        Mixture([Subset(stream("a", 5), ()), Subset(source("b", 5), range(5), 0.5)], 0)
    assert set(names(Mixture([Subset(stream("a", 5), ())], 0), range(5))) == {f"a[{i}]" for i in range(5)}


def test_a_stream_is_a_pure_function_of_the_place_too():
    mixture = Mixture([Subset(stream("a", 600), ())], 5)
    order = names(mixture, range(1200))
    assert sorted(order[:600]) == sorted(order[600:]) == sorted(f"a[{i}]" for i in range(600))
    assert order[:600] != order[600:] and order[:600] != [f"a[{i}]" for i in range(600)]
    assert names(mixture, [1, 1, 700, 2]) == [order[1], order[1], order[700], order[2]]  # back, too
    assert names(pickle.loads(pickle.dumps(mixture)), [900]) == [order[900]]
    assert names(Mixture(mixture.groups[0], 6), range(20)) != order[:20]


def test_a_stream_without_examples_is_no_endless_search():
    with pytest.raises(DataError, match="a has no example"):
        Mixture([Subset(stream("a", 0), ())], 5).example(0)


def keys(parts):
    return [{part.source.key(n) for n in part.numbers} for part in parts]


def test_a_share_held_out_is_a_share_and_stays_when_data_grows():
    small, large = (source("mine", n, keys=[f"{i}.png" for i in range(n)]) for n in (2000, 3000))
    (learned,), (held,) = (keys(parts) for parts in split([(small, None)], 0.1))
    assert not learned & held and len(learned | held) == 2000 and 150 < len(held) < 250
    (grown,), (also,) = (keys(parts) for parts in split([(large, None)], 0.1))
    assert held <= also and learned <= grown
    moved = source("elsewhere", 2000, keys=[f"{i}.png" for i in range(2000)])
    assert keys(split([(moved, None)], 0.1)[1]) == [held]
    assert held < keys(split([(small, None)], 0.2)[1])[0]


def test_a_number_held_out_is_that_number_over_all_sources():
    sources = [(source(name, n, keys=[f"{name}{i}" for i in range(n)]), 0.5) for name, n in (("a", 30), ("b", 60))]
    learned, held = split(sources, 9)
    assert sum(map(len, held)) == 9 and sum(map(len, learned)) == 81
    assert all(part.weight == 0.5 for part in [*learned, *held])
    pairs = source("c", 40, keys=[f"{i // 2}.png" for i in range(40)])  # two questions a picture
    (learned,), (held,) = split([(pairs, None)], 5)
    assert len(held) == 6 and not keys([learned])[0] & keys([held])[0]


def test_what_is_drawn_without_end_is_not_held_out():
    parts = [(source("drawn", 5000, endless=True), 0.2), (source("mine", 20), None)]
    for validation in (0.5, 4):
        learned, held = split(parts, validation)
        assert [part.source.path for part in held] == ["mine"] and len(learned[0]) == 5000
    assert len(held[0]) == 4
    with pytest.raises(DataError, match="drawn has no size"):
        Mixture([Subset(one, range(len(one))) for one, _ in parts], 0)


def test_a_stream_is_split_as_it_comes():
    (learned,), (held,) = split([(stream("a", 1000), 0.5)], 0.1)
    kept, out = ({number for number, _ in part.source.numbered()} for part in (learned, held))
    assert kept | out == set(range(1000)) and not kept & out and 70 < len(out) < 130
    (whole,), nothing = split([(stream("a", 1000), None)], 0)
    assert len(list(whole.source.numbered())) == 1000 and nothing == []


@pytest.mark.parametrize(
    ("sources", "validation", "words"),
    [
        ([source("a", 5)], 5, "5 of 5 examples leaves none"),
        ([source("a", 5), stream("b", 5)], 5, "name a share"),
        ([source("a", 3)], 0.001, "holds nothing out"),
        ([source("a", 1), source("b", 100)], 100, "no example of a to learn from"),
    ],
)
def test_splits_that_leave_nothing_are_refused(sources, validation, words):
    with pytest.raises(DataError, match=words):
        split([(one, None) for one in sources], validation)


def test_batches_are_a_pure_function_and_can_be_sent(tiled):
    mixture = Mixture([Subset(source("a", 10), range(10)), Subset(stream("b", 10), (), 0.5)], 0)
    batches = Batches(mixture, tiled[1], 3)
    sent = pickle.loads(pickle.dumps(batches))
    batches(4)
    for one, other in zip(batches(2).values(), sent(2).values()):
        assert torch.equal(one, other)
    assert not torch.equal(batches(2)["input_ids"], batches(3)["input_ids"])


def test_what_is_shown_again_is_shown_a_little_differently(tiled):
    """And what never comes again, or is shown for the first time, as it is."""
    picture = Image.frombytes("RGB", (40, 30), random.Random(0).randbytes(3600))
    show = lambda record, name: Example([picture], [("?", str(record))], name)  # noqa: E731
    small, endless = Source("small", range(6), show), Source("endless", range(10**6), show, endless=True)
    mixture = Mixture([Subset(small, range(6)), Subset(endless, range(10**6), 0.4)], 0)
    plain, augmented = (Batches(mixture, tiled[1], 1, augment=most) for most in (0.0, 0.2))
    seen = set()
    for place in range(40):
        as_it_is, shown = plain(place), augmented(place)
        again = mixture.pick(*mixture.locate(place))[0].path == "small" and mixture.epoch(place) > 0
        assert torch.equal(as_it_is["images"], shown["images"]) != again
        assert torch.equal(shown["images"], augmented(place)["images"]), "a pure function of the place"
        seen.add(shown["images"].numpy().tobytes())
    assert len(seen) > 10


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (40, 30), (1000, 7)])
def test_a_crop_takes_no_more_than_its_part_of_each_side(size):
    picture, rng, sizes = Image.new("RGB", size), random.Random(0), set()
    for _ in range(200):
        sizes.add(random_crop(picture, 0.1, rng).size)
        assert min(random_crop(picture, 0.49, rng).size) > 0
    for side, cut in zip(size, zip(*sizes)):
        assert max(cut) <= side and min(cut) >= side - 2 * int(0.1 * side)
        assert len(set(cut)) > 2 or side < 20


@pytest.mark.parametrize("kind", ["source", "stream"])
def test_a_bad_example_stops_or_lets_the_next_take_its_place(kind, tiled, capsys):
    records = ["bad" if i % 3 == 0 else f"good {i}" for i in range(12)]
    if kind == "source":
        part = Subset(Source("a", records, numbered), range(12))
    else:
        part = Subset(Stream("a", partial(iter, records), numbered, always), ())
    mixture = Mixture([part], 0)
    with pytest.raises(ExampleError, match=r"^a\[\d+\] has an empty answer"):
        Batches(mixture, tiled[1], 12)(0)
    batches = Batches(mixture, tiled[1], 12, skip=True)
    assert all(
        torch.equal(one, other)
        for one, other in zip(batches(0).values(), Batches(mixture, tiled[1], 12, True)(0).values())
    )
    skipped = capsys.readouterr().err.splitlines()
    assert len(skipped) >= 4 and all(line.startswith("skipped: a[") for line in skipped)
    batches(0)
    assert capsys.readouterr().err == "", "each is told once, not at every epoch"
    bad = Batches(Mixture([Subset(Source("a", ["bad"] * 9, numbered), range(9))], 0), tiled[1], 1, skip=True)
    with pytest.raises(DataError, match="100 examples in a row cannot be used"):
        bad(0)
