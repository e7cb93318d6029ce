"""The order of examples is a pure function of seed and position, shares are kept, and held-out images stay so."""

import pickle
import random
from collections import Counter

import pytest
import torch
from PIL import Image

from nanovlm.data import Batches, Example, ExampleError, Mixture, ReadOptions, Source, Subset, open_data
from nanovlm.data.examples import questions
from nanovlm.data.mixture import source_lines, split
from nanovlm.data.source import digest_of, keys_of
from nanovlm.errors import DataError, NanoVLMError, UsageError
from nanovlm.processing.image_loading import augment
from support import noise_image
from support.data import png, write


def make_example(record):
    """An example whose answer is its record; one with an empty answer if the record is "bad"."""
    return Example([Image.new("RGB", (16, 16))], [("?", "" if record == "bad" else f"{record}")], f"{record}")


def source(name, n, images=None, **options):
    """Examples name0, name1, ...; images[i] names the images of the i-th."""
    images = images or [[f"{name}{i}"] for i in range(n)]
    keys = [tuple(digest_of(image.encode()) for image in images[i]) for i in range(n)]
    return Source(name, [f"{name}{i}" for i in range(n)], make_example, keys=keys, **options)


def whole(*sources):
    return [Subset(source, range(len(source)), weight) for source, weight in sources]


def names(mixture, positions):
    picked = [mixture.pick(*mixture.locate(position)) for position in positions]
    return [source.rows[i] for source, i in picked]


def test_every_epoch_shows_each_example_once_in_its_own_order():
    subsets = [Subset(source("a", 7), range(7)), Subset(source("b", 5), [0, 2, 4])]
    everything = {f"a{i}" for i in range(7)} | {"b0", "b2", "b4"}
    order = names(Mixture(subsets, 0), range(40))
    epochs = [order[start : start + 10] for start in range(0, 40, 10)]
    assert all(set(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert names(Mixture(subsets, 1), range(10)) != order[:10]


def test_order_is_a_pure_function_of_seed_and_position():
    subsets = whole((source("a", 700), 0.5), (source("b", 50), None))
    order = names(Mixture(subsets, 3), range(2100))
    for position in (2099, 0, 999, 1000, 1001, 17):  # in any order, from a new object
        assert names(Mixture(subsets, 3), [position]) == order[position : position + 1]
    assert names(pickle.loads(pickle.dumps(Mixture(subsets, 3))), range(500, 600)) == order[500:600]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((None, 0.3, None), (0.4667, 0.3, 0.2333)), ((2, 1, 1), (0.5, 0.25, 0.25)), ((None,) * 3, (4 / 7, 1 / 7, 2 / 7))],
)
def test_shares_hold_all_along(weights, shares):
    sources = [source(name, n) for name, n in zip("abc", (400, 100, 200))]
    mixture = Mixture(whole(*zip(sources, weights)), 0)
    shown = names(mixture, range(7000))
    for n, tolerance in ((700, 0.05), (2000, 0.005), (7000, 0.005)):
        seen = Counter(name[0] for name in shown[:n])
        assert all(abs(seen[name] / n - share) < tolerance for name, share in zip("abc", shares))


@pytest.mark.parametrize(
    ("weights", "endless", "message"),
    [
        ((1.0, None), False, "leave nothing for b"),
        ((None, 0.5), True, "a has no size .* as in a@0.3"),
    ],
)
def test_impossible_shares_are_refused(weights, endless, message):
    with pytest.raises(DataError, match=message):
        Mixture(whole((source("a", 5, endless=endless), weights[0]), (source("b", 5), weights[1])), 0)


# -------------------------------------------------------------------------------------------------- holding out


def keys(subset):
    return {key for i in subset.indices for key in subset.source.keys[i]}


def test_held_out_images_stay_when_data_grow_and_share_no_image():
    small, large = source("a", 2000), source("a", 3000)
    (train,), (held_out,) = split([(small, None)], 0.1)
    assert len(held_out) == 200 and len(train) == 1800 and not keys(train) & keys(held_out)
    (_, (of_large,)) = split([(large, None)], 0.1)
    assert len(keys(held_out) & keys(of_large)) > 150
    assert keys(held_out) < keys(split([(small, None)], 0.2)[1][0])


@pytest.mark.parametrize(
    "images",
    [
        [[f"{i // 2}.png"] for i in range(40)],
        [[f"{i // 4}.png", f"own {i}.png"] for i in range(40)],
        [[f"{i}.png", f"{i + 1}.png"] if i % 5 else [f"{i}.png"] for i in range(40)],
    ],
    ids=["questions of one image", "one image in several sets", "chains"],
)
def test_examples_that_share_an_image_are_on_one_side(images):
    (train,), (held_out,) = split([(source("c", 40, images), None)], 5)
    assert 5 <= len(held_out) <= 10 and not keys(train) & keys(held_out)


def test_an_image_of_two_sources_is_on_one_side():
    images = [[f"{i}.png"] for i in range(100)]
    train, held_out = split([(source("a", 100, images), 0.5), (source("b", 100, images), 0.5)], 20)
    assert [len(subset) for subset in held_out] == [10, 10]
    assert not set().union(*map(keys, train)) & set().union(*map(keys, held_out))


@pytest.mark.parametrize(("examples", "expected"), [(99, 0), (100, 10), (999, 99), (5000, 200)])
def test_a_tenth_is_held_out_by_default_but_none_of_few(examples, expected):
    sources = [(source("a", examples), None), (source("drawn", 9, endless=True), 0.2)]
    by_default, same = ([[s.indices for s in side] for side in split(sources, n)] for n in (None, expected))
    assert by_default == same and sum(map(len, same[1])) == expected


def test_nothing_is_held_out_by_default_of_one_image():
    train, held_out = split([(source("a", 500, [["one.png"]] * 500), None)], None)
    assert held_out == [] and len(train[0]) == 500


@pytest.mark.parametrize(
    ("sources", "validation", "message"),
    [
        ([source("a", 5)], 5, "5 of 5 examples leaves none"),
        ([source("a", 3, [["x"]] * 3)], 0.5, "holds nothing out"),
        ([source("a", 1, [["b1"]]), source("b", 100, [[f"b{i}"] for i in range(100)])], 100, "no example of "),
    ],
)
def test_splits_that_leave_nothing_are_refused(sources, validation, message):
    with pytest.raises(DataError, match=message):
        split([(one, None) for one in sources], validation)


@pytest.fixture
def cards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k in range(20):  # ten images under two names
        write(f"cards/{k}.png", png(k // 2))
        write(f"cards/{k}.txt", f"card {k}")
    write("own/a.png", png(3))
    write("own/b.png", png(15))
    write("own/metadata.csv", "file_name,text\na.png,x\nb.png,y\n")


def test_copies_of_an_image_are_on_one_side_and_the_flag_may_be_text(cards):
    train, held_out = open_data(["cards"], ReadOptions(), "4")
    sides = [{h for example in side[0] for h in keys_of(example, {})} for side in (train, held_out)]
    assert [len(train[0]), len(held_out[0])] == [16, 4] and not sides[0] & sides[1]
    again = open_data(["./cards"], ReadOptions(), 0.2)[1][0]
    assert again.indices == held_out[0].indices
    assert "cards: reading image image, question --prompt, answer text" in source_lines(train, held_out)


def test_a_validation_set_of_ones_own(cards):
    (train,), (held_out,) = sides = open_data(["cards"], ReadOptions(), "own")
    assert len(train) == 20 and [example.qa_pairs[0][1] for example in held_out] == ["x", "y"]
    assert "own: 1 of its images are also trained on" in source_lines(*sides)


@pytest.mark.parametrize(
    ("options", "validation", "message"),
    [
        ({"images": "own"}, 0, "--images has no effect on cards"),
        ({"stream": True}, 0, "--stream has no effect on cards"),
        ({}, "1.5", "--validation 1.5 must be a whole number"),
        ({}, -1.0, "--validation -1.0 must be a whole number"),
        ({}, "gone", "gone: no such file or folder"),
        ({"text_column": "label"}, 0, "no column 'label', only image, text"),
    ],
)
def test_options_without_effect_are_refused(cards, options, validation, message):
    with pytest.raises(NanoVLMError, match=message):
        open_data(["cards"], ReadOptions(**options), validation)


def test_a_prompt_that_nobody_is_asked_is_refused(cards):
    write("chat.json", [{"image": "own/a.png", "question": "Q?", "answer": "A."}])
    with pytest.raises(UsageError, match="--prompt has no effect on chat.json"):
        open_data(["chat.json"], ReadOptions(prompt="Name it."), 0)


def test_several_rows_of_one_image_are_one_question_with_several_references(cards):
    texts = ["one", "two", "three"]
    write("own/metadata.csv", "file_name,text\n" + "".join(f"{n}.png,{t}\n" for n in "ab" for t in texts))
    (train,), _ = open_data(["own"], ReadOptions(), 0)
    asked = questions(("own", example) for example in train)
    assert [list(question.references) for question in asked] == [texts, texts]


def test_turns_are_asked_in_order_and_masked_ones_are_not():
    example = Example([], [("a", "b"), ("c", "d"), ("e", "f")], multi_turn=True, learned=(True, False, True))
    asked = [(question.prompt, list(question.history)) for question in questions([("x", example)])]
    assert asked == [("a", []), ("e", [("a", "b"), ("c", "d")])]


# ------------------------------------------------------------------------------------------------------ batches


def test_batches_are_a_pure_function_and_can_be_pickled(tiled):
    batches = Batches(Mixture(whole((source("a", 10), None)), 0), tiled[1], 3)
    unpickled = pickle.loads(pickle.dumps(batches))
    batches(4)
    torch.testing.assert_close(batches(2), unpickled(2), atol=0, rtol=0)
    assert not torch.equal(batches(2)["input_ids"], batches(3)["input_ids"])


def test_only_images_shown_before_are_changed(tiled):
    image = noise_image(40, 30)
    make = lambda record: Example([image], [("?", str(record))])  # noqa: E731
    small, endless = Source("small", range(6), make), Source("endless", range(10**6), make, endless=True)
    mixture = Mixture([Subset(small, range(6)), Subset(endless, range(10**6), 0.4)], 0)
    plain, augmented = (Batches(mixture, tiled[1], 1, augment=amount) for amount in (0.0, 0.2))
    seen, different = set(), set()
    for position in range(40):
        original, changed = plain(position)["images"], augmented(position)["images"]
        picked, i = mixture.pick(*mixture.locate(position))
        assert torch.equal(original, changed) != ((picked.path, i) in seen)
        assert torch.equal(changed, augmented(position)["images"]), "a pure function of the position"
        seen.add((picked.path, i))
        different.add(changed.numpy().tobytes())
    assert len(different) > 10


@pytest.mark.parametrize("size", [(1, 1), (40, 30), (1000, 7)])
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


def test_bad_example_raises_or_the_next_one_replaces_it(tiled, caplog):
    records = ["bad" if i % 3 == 0 else f"good {i}" for i in range(12)]
    mixture = Mixture([Subset(Source("a", records, make_example), range(12))], 0)
    with pytest.raises(ExampleError, match=r"^bad has an empty answer"):
        Batches(mixture, tiled[1], 12)(0)
    batches, again = (Batches(mixture, tiled[1], 12, skip_errors=True) for _ in range(2))
    first = batches(0)
    batches(0)
    assert len(caplog.messages) == 1, "each is reported once, not at every epoch"
    assert all(torch.equal(one, other) for one, other in zip(first.values(), again(0).values()))
    only = Mixture([Subset(Source("a", ["bad"] * 9, make_example), range(9))], 0)
    with pytest.raises(DataError, match="100 examples in a row cannot be used"):
        Batches(only, tiled[1], 1, skip_errors=True)(0)
