"""The order of examples is a pure function of seed and position, shares are kept, and held-out images stay so."""

import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch
from PIL import Image

from nanovlm.data import Example, ExampleBatches, ExampleError, Mixture, ReadOptions, Source, check_data, open_data
from nanovlm.data.examples import questions
from nanovlm.data.mixture import source_lines, split
from nanovlm.data.source import digest_of, keys_of
from nanovlm.errors import DataError, NanoVLMError
from nanovlm.processing.conversation import dialogue
from support import noise_image
from support.data import about, message, pairs_of, png, write


def make_example(record):
    """An example whose answer is its record; one with an empty answer if the record is "bad"."""
    return about([Image.new("RGB", (16, 16))], ("?", "" if record == "bad" else f"{record}"), name=f"{record}")


def source(name, n, images=None, **options):
    """Examples name0, name1, ...; images[i] names the images of the i-th."""
    images = images or [[f"{name}{i}"] for i in range(n)]
    keys = [tuple(digest_of(image.encode()) for image in images[i]) for i in range(n)]
    return Source(name, [f"{name}{i}" for i in range(n)], make_example, keys=keys, **options)


def whole(*sources):
    return [replace(source, weight=weight) for source, weight in sources]


def names(mixture, positions):
    picked = [mixture.pick(*mixture.locate(position)) for position in positions]
    return [source.rows[i] for source, i in picked]


def test_every_epoch_shows_each_example_once_in_its_own_order():
    subsets = [source("a", 7), source("b", 5).part([0, 2, 4])]
    order = names(Mixture(subsets, 0), range(40))
    epochs = [order[start : start + 10] for start in range(0, 40, 10)]
    assert all(set(epoch) == {f"a{i}" for i in range(7)} | {"b0", "b2", "b4"} for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert names(Mixture(subsets, 1), range(10)) != order[:10]


SHARES = [
    ((None, 0.3, None), (0.4667, 0.3, 0.2333)),
    ((2, 1, 1), (0.5, 0.25, 0.25)),
    ((None,) * 3, (4 / 7, 1 / 7, 2 / 7)),
]


@pytest.mark.parametrize(("weights", "shares"), SHARES)
def test_shares_hold_all_along_and_the_order_is_a_pure_function_of_seed_and_position(weights, shares):
    subsets = whole(*zip([source(name, n) for name, n in zip("abc", (400, 100, 200))], weights))
    shown = names(Mixture(subsets, 0), range(7000))
    for n, tolerance in ((700, 0.05), (7000, 0.005)):
        seen = Counter(name[0] for name in shown[:n])
        assert all(abs(seen[name] / n - share) < tolerance for name, share in zip("abc", shares))
    for position in (2099, 0, 999, 17):  # in any order, from a new object
        assert names(pickle.loads(pickle.dumps(Mixture(subsets, 0))), [position]) == [shown[position]]
    mixture, turns = Mixture(subsets, 0), Counter()
    for position in range(500):
        group, turn = mixture.locate(position)
        assert turn == turns[group], "no turn of a group is left out"
        turns[group] += 1


def test_what_leaves_nothing_to_learn_or_to_ask_is_refused():
    rows = ((1.0, None), False, "leave nothing for b"), ((None, 0.5), True, "a has no size .* as in a@0.3")
    for weights, endless, words in rows:
        with pytest.raises(DataError, match=words):
            Mixture(whole((source("a", 5, endless=endless), weights[0]), (source("b", 5), weights[1])), 0)
    for sources, validation, words in (
        ([source("a", 5)], 5, "5 of 5 examples leaves none"),
        ([source("a", 3, [["x"]] * 3)], 0.5, "holds nothing out"),
        ([source("a", 1, [["b1"]]), source("b", 100)], 99, "leaves no example of a to learn from"),
    ):
        with pytest.raises(DataError, match=words):
            split(sources, validation)


def keys(*subsets):
    return {key for one in subsets for keys in one.keys for key in keys}


def labeled(name, n, label=lambda i: str(i), **options):
    """A source whose i-th example has an image of its own, and label(i) as its answer."""
    one = source(name, n, **options)
    one.answers = [[label(i)] for i in range(n)]
    return one


def sides(source, validation):
    return [keys(*side) for side in split([source], validation)]


def test_shares_of_the_images_stay_held_out_when_data_grow_and_many_answers_are_no_classes():
    (train, held_out), (grown_train, grown_held_out) = (sides(source("a", n), 0.1) for n in (2000, 3000))
    assert 160 < len(held_out) < 240 and held_out < grown_held_out and train < grown_train
    assert held_out < sides(source("a", 2000), 0.2)[1]
    _, (of_three,) = split([source("a", 2000, [[f"{k}{i}" for k in "abc"] for i in range(2000)])], 0.1)
    assert 160 < len(of_three) < 240, "the lowest of three hashes would be low too often"
    train, held_out = sides(labeled("a", 400, lambda i: f"{i % 41}"), 0.1)
    assert held_out == {key for key in train | held_out if key < f"{int(0.1 * 16**24):024x}"}
    one = labeled("a", 100, lambda i: f"label {i % 10}")
    train, held_out = sides(one, 9)
    assert len(held_out) == 9 and min(train) > max(held_out) and "nothing is held out of" in one.lines[0]


@pytest.mark.parametrize("validation", [None, 200])
def test_of_a_number_those_with_the_lowest_hashes_are_held_out(validation):
    """A new example with a lower hash sends the one with the highest back to the training examples; none else moves."""
    (_, held_out), (train, grown) = (sides(source("a", n), validation) for n in (2000, 3000))
    assert len(held_out) == len(grown) == 200 and min(train) > max(grown)
    assert held_out - grown == {key for key in held_out if key > max(grown)}


@pytest.mark.parametrize("validation", [None, 0.02, 0.1, 11, 40])
def test_each_of_few_answers_is_held_out_and_learned(validation):
    one = labeled("a", 103, lambda i: f"label {i % 10}" if i < 100 else "two" if i < 102 else "one")
    train, held_out = split([one], validation)
    answers = [Counter(answer for (answer,) in side[0].answers) for side in (train, held_out)]
    assert answers[0]["two"] == answers[0]["one"] == answers[1]["two"] == 1 and answers[1]["one"] == 0
    assert (len(answers[0]), len(answers[1])) == (12, 11)
    assert one.lines == ["nothing is held out of 1 answer, the first 'one'"]
    assert sides(labeled("a", 103, lambda i: one.answers[i][0]), len(held_out[0]))[1] == keys(held_out[0]), "resumed"


def test_examples_of_few_answers_stay_unless_their_class_has_another():
    """A class's only held-out example may become a training example; its only training example a held-out one."""
    label = lambda i: f"label {i % 20}"  # noqa: E731
    for n in (60, 100, 200, 400):
        (train, held_out), (more_train, more_held_out) = (sides(labeled("a", k, label), 0.1) for k in (n, 2 * n))
        limit = f"{int(0.1 * 16**24):024x}"
        assert all(key >= limit for key in held_out & more_train), "only those that were held out for their class"
        assert all(key < limit for key in train & more_held_out), "only those that were learned for their class"
        assert len(held_out & more_train) + len(train & more_held_out) <= 20


SHARED = {  # images of 40 examples, and the number of sources that have them
    "questions of one image": ([[f"{i // 2}.png"] for i in range(40)], 1),
    "one image in several sets": ([[f"{i // 4}.png", f"own {i}.png"] for i in range(40)], 1),
    "chains": ([[f"{i}.png", f"{i + 1}.png"] if i % 5 else [f"{i}.png"] for i in range(40)], 1),
    "an image of two sources": ([[f"{i}.png"] for i in range(40)], 2),
}


@pytest.mark.parametrize(("images", "n_sources"), SHARED.values(), ids=SHARED)
def test_examples_that_share_an_image_are_on_one_side(images, n_sources):
    train, held_out = split([source(name, 40, images) for name in "ab"[:n_sources]], 6)
    assert 6 <= sum(map(len, held_out)) <= 10 and not keys(*train) & keys(*held_out)


@pytest.mark.parametrize(("n", "images", "held"), [(99, 0, 0), (100, 0, 10), (999, 0, 99), (5000, 0, 200), (500, 1, 0)])
def test_a_tenth_is_held_out_by_default_but_none_of_few_or_of_one_image(n, images, held):
    sources = [source("a", n, [["one.png"]] * n * images), source("drawn", 9, endless=True, weight=0.2)]
    train, held_out = split(sources, None)
    assert sum(map(len, held_out)) == held and [len(subset) for subset in train] == [n - held, 9]


@pytest.fixture
def cards():
    for k in range(20):  # ten images under two names
        write(f"cards/{k}.png", png(k // 2))
        write(f"cards/{k}.txt", f"card {k}")
    write("own/metadata.csv", "file_name,text\n" + "".join(f"{n}.png,{n}{i}\n" for n in "ab" for i in range(3)))
    write("own/a.png", png(3))
    write("own/b.png", png(15))
    write("chat.json", [{"image": "own/a.png", "question": "Q?", "answer": "A."}])


def test_copies_of_an_image_are_on_one_side_and_an_own_validation_set_has_its_references(cards):
    train, held_out = open_data(["cards"], ReadOptions(), "4")
    sides = [{key for example in side[0] for key in keys_of(example, {})} for side in (train, held_out)]
    assert [len(train[0]), len(held_out[0])] == [16, 4] and not sides[0] & sides[1]
    assert open_data(["./cards@0.5"], ReadOptions(), 4)[1][0].keys == held_out[0].keys
    line = "cards: reading image from the image file, question from --prompt, answer from the text file"
    assert line in source_lines(train, held_out)
    (train,), (held_out,) = sides = open_data(["cards"], ReadOptions(), "own")
    asked = questions(("own", example) for example in held_out)
    assert [question.references for question in asked] == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]
    assert len(train) == 20 and "own: 1 of its images are also trained on" in source_lines(*sides)


MEANT = [  # data, flags, first questions
    (["table.json", "chat.json"], {"prompt_column": "ask"}, ["Why?", "Q?"]),
    (["table.json", "own"], {"prompt_column": "ask"}, ["Why?"]),
    (["own", "table.json"], {"text_column": "say", "prompt_column": "ask"}, ["Why?"]),
    (["own", "table.json"], {"image_column": "left"}, ["What?"]),
    (["table.json", "scenes@0.5"], {"prompt_column": "ask"}, ["Why?"]),
]


def test_a_flag_holds_for_the_sources_that_it_can_mean_and_wrong_use_is_refused(cards):
    texts = {"ask": "Why?", "question": "What?", "answer": "A.", "say": "B."}
    write("table.json", [{"left": "own/b.png", "image": "own/a.png"} | texts])
    for data, options, expected in MEANT:
        train, _ = open_data(data, ReadOptions(**options), 0)
        asked = [pairs_of(next(iter(one)))[0][0] for one in train if one.path.endswith(".json")]
        assert asked == expected and len(train) == 2
    for data, options, validation, words in WRONG:
        with pytest.raises(NanoVLMError, match=words):
            open_data(data.split(), ReadOptions(**options), validation)


def test_turns_are_asked_in_order_and_masked_ones_are_not():
    chat = [replace(turn, learned=turn.text != "d") for turn in dialogue("abcdef")]
    asked = questions([("x", Example([], [chat]))])
    assert ["".join(turn.text for turn in question.chat) for question in asked] == ["a", "abcde"]
    assert [question.references for question in asked] == [["b"], ["f"]]
    assert len(questions([("x", Example([], [chat]))] * 2)) == 4, "texts without an image have no references in common"


WRONG = [  # data, options, validation, words of the error
    ("cards", {"images": "own"}, 0, "--images has no effect on cards"),
    ("chat.json", {"prompt": "Name it."}, 0, "--prompt has no effect on chat.json"),
    ("own", {"extension": ".caption"}, 0, "--extension has no effect on own; omit it"),
    ("cards", {"extension": "a/b"}, 0, "extension=a/b must be like .caption"),
    ("cards", {"text_column": "label"}, 0, "no column 'label', only image file, text"),
    ("chat.json", {"prompt_column": "ask"}, 0, "no column 'ask', only answer, image, question; name one with"),
    ("own cards", {"prompt_column": "ask"}, 0, "--prompt-column: own, cards: no column 'ask', only file_name,"),
    ("cards", {}, "1.5", "--validation 1.5 must be a whole number"),
    ("cards", {}, -1.0, "--validation -1.0 must be a whole number"),
    ("cards", {}, "gone", "gone: no such file or folder"),
    ("cards@x", {}, 0, "'x' is no share"),
]


CHECKED = [
    "labels: 4 examples, 4 different images\n", "answer from the name of the folder", "by answer: red 2, blue 1",
    "chat.json: trained on 1 example, ", "; the longest takes ", "not learned: No.\n", "    learned: Yes.\n",
    "2 cannot be used", "red/3.png: not an image", "chat.json[1] has no column text", "learned: blue",
]  # fmt: skip


def test_check_data(tiled, capsys):
    for i, label in enumerate(("red", "red", "blue")):
        write(f"labels/{label}/{i}.png", png(i))
    write("labels/red/3.png", b"no image")
    turns = [message("user", "Q?"), message("assistant", "No.") | {"weight": 0}]
    turns += [message("user", "W?"), message("assistant", "Yes.")]
    write("chat.json", [{"image": "labels/red/0.png", "messages": turns}, {"image": "labels/red/0.png"}])
    for on_error, code in (("stop", 1), ("skip", 0)):
        train, held_out = open_data(["chat.json", "labels"], ReadOptions(on_error=on_error), 0, check=True)
        assert check_data(train, held_out, tiled[1], on_error == "skip") == code
        out = capsys.readouterr().out
        assert all(words in out for words in CHECKED), out


def test_batches_are_a_pure_function_and_can_be_pickled(tiled):
    batches = ExampleBatches(Mixture(whole((source("a", 10), None)), 0), tiled[1], 3)
    unpickled = pickle.loads(pickle.dumps(batches))
    batches(4)
    torch.testing.assert_close(batches(2), unpickled(2), atol=0, rtol=0)
    assert not torch.equal(batches(2)["input_ids"], batches(3)["input_ids"])


def test_only_images_shown_before_are_changed(tiled):
    image = noise_image(40, 30)
    make = lambda record: about([image], ("?", str(record)))  # noqa: E731
    small, endless = Source("small", range(6), make), Source("endless", range(10**6), make, endless=True)
    mixture = Mixture([small, replace(endless, weight=0.4)], 0)
    plain, augmented = (ExampleBatches(mixture, tiled[1], 1, augment=amount) for amount in (0.0, 0.2))
    seen, different = set(), set()
    for position in range(25):
        original, changed = plain(position)["images"], augmented(position)["images"]
        picked, i = mixture.pick(*mixture.locate(position))
        assert torch.equal(original, changed) != ((picked.path, i) in seen)
        assert torch.equal(changed, augmented(position)["images"]), "a pure function of the position"
        seen.add((picked.path, i))
        different.add(changed.numpy().tobytes())
    assert len(different) > 7


def test_bad_example_raises_or_the_next_one_replaces_it(tiled, caplog):
    records = ["bad" if i % 3 == 0 else f"good {i}" for i in range(12)]
    mixture = Mixture([Source("a", records, make_example)], 0)
    with pytest.raises(ExampleError, match=r"^bad has an empty answer"):
        ExampleBatches(mixture, tiled[1], 12)(0)
    batches, again = (ExampleBatches(mixture, tiled[1], 12, skip_errors=True) for _ in range(2))
    first = batches(0)
    batches(0)
    assert len(caplog.messages) == 1, "each is reported once, not at every epoch"
    assert all(torch.equal(one, other) for one, other in zip(first.values(), again(0).values()))
    only = Mixture([Source("a", ["bad"] * 9, make_example)], 0)
    with pytest.raises(DataError, match="100 examples in a row cannot be used"):
        ExampleBatches(only, tiled[1], 1, skip_errors=True)(0)
