"""The scenes' promises, re-derived from the things' coordinates, the pixels and the words alone."""

import math
from collections import Counter
from itertools import combinations
from random import Random

import pytest

from nanovlm.synthetic import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    WITHHELD,
    Scene,
    caption,
    draw,
    names_withheld,
    questions,
    random_scene,
)
from nanovlm.synthetic.drawing import TONES


@pytest.fixture(scope="module")
def scenes():
    return [random_scene(Random(seed)) for seed in range(2000)]


@pytest.fixture(scope="module")
def asked(scenes):
    return [(scene, questions(scene, Random(i))) for i, scene in enumerate(scenes)]


def test_the_same_seed_says_and_draws_the_same():
    for seed in range(20):
        a, b = random_scene(Random(seed)), random_scene(Random(seed))
        assert a == b and caption(a) == caption(b)
        assert draw(a).tobytes() == draw(b).tobytes()
        assert questions(a, Random(1)) == questions(b, Random(1))
    assert draw(random_scene(Random(1))).tobytes() != draw(random_scene(Random(2))).tobytes()


def test_withheld_pairs_take_every_shape_and_colour_once():
    assert len(WITHHELD) == 8
    assert {colour for colour, _ in WITHHELD} == set(COLOURS) and {shape for _, shape in WITHHELD} == set(SHAPES)


def test_no_training_scene_shows_or_mentions_a_withheld_pair(asked):
    pairs = [" ".join(pair) for pair in WITHHELD]
    for scene, said in asked:
        text = " ".join([caption(scene), *(f"{question} {answer}" for question, answer in said)])
        assert not names_withheld(scene) and not any(pair in text for pair in pairs)


def test_withheld_scenes_always_caption_a_withheld_pair():
    for seed in range(500):
        scene = random_scene(Random(seed), withheld=True)
        assert names_withheld(scene)
        assert any(" ".join(pair) in caption(scene) for pair in WITHHELD)


def test_captions_go_from_left_to_right_and_down_a_column(scenes):
    for scene in scenes:
        for a, b in combinations(scene.things, 2):  # a is told before b
            dx, dy = b.x - a.x, b.y - a.y
            assert dx >= 0.09 or (abs(dx) < 0.035 and dy >= 0.15)
        names = [f"{'an' if t.size[0] in 'aeiou' else 'a'} {t.size} {t.colour} {t.shape}" for t in scene.things]
        assert len(set(names)) == len(names)
        told = caption(scene)
        assert told.endswith(f" on a {scene.background} background.") and told.startswith("A ")
        starts = [told.lower().index(name) for name in names]
        assert starts == sorted(starts)
        assert (told.count(","), told.count(" and ")) == (max(0, len(names) - 2), int(len(names) > 1))


def test_things_lie_inside_and_overlap_little(scenes):
    touching = 0
    for scene in scenes:
        for t in scene.things:
            assert SIZES[t.size][0] <= t.radius <= SIZES[t.size][1] and abs(t.angle) <= 8
            assert t.radius < min(t.x, t.y, 1 - t.x, 1 - t.y)
        for a, b in combinations(scene.things, 2):
            overlap = a.radius + b.radius - math.dist((a.x, a.y), (b.x, b.y))
            assert overlap <= 0.3 * min(a.radius, b.radius) + 1e-9
            touching += overlap > 0
    assert 0.05 < touching / len(scenes) < 0.15


def test_every_combination_occurs(scenes):
    things = [thing for scene in scenes for thing in scene.things]
    assert len({(t.colour, t.shape, t.size) for t in things}) == 2 * (64 - 8)
    assert {(s.background, t.shape) for s in scenes for t in s.things} == {(b, s) for b in BACKGROUNDS for s in SHAPES}
    counts = Counter(len(scene.things) for scene in scenes)
    assert all(400 < counts[n] < 600 for n in (1, 2, 3, 4))
    assert 0.35 < sum(t.size == "large" for t in things) / len(things) < 0.6


def _fitting(phrase, things):
    words = phrase.removeprefix("the ").replace("object", "").split()
    return [t for t in things if {*words} <= {t.size, t.colour, t.shape}]


def _only(phrase, things):
    (thing,) = _fitting(phrase, things)
    return thing


def _beyond(side, a, b):
    """How far a lies on that side of b, and whether it does at all."""
    return {"left": b.x - a.x, "right": a.x - b.x, "above": b.y - a.y, "below": a.y - b.y}[side.split()[0]]


_NINE = [["top left", "top", "top right"], ["left", "middle", "right"], ["bottom left", "bottom", "bottom right"]]


def _thirds(t):
    assert all(abs(v - line) >= 0.035 for v in (t.x, t.y) for line in (1 / 3, 2 / 3))
    return _NINE[math.floor(t.y * 3)][math.floor(t.x * 3)]


def _answer(question, scene):
    """Read the question's words and look at the things: a second way to the answer."""
    things, words = scene.things, question.rstrip("?").split()
    numbers = ["none", "one", "two", "three", "four"]
    if question == "What is the background like?":
        return scene.background
    if question.startswith("How many"):
        phrase = " ".join(words[2:-2]).replace("crosses", "cross")
        phrase = phrase if phrase == "cross" else phrase.removesuffix("s")
        return numbers[len(_fitting(phrase, things))]
    for start, field in (("What colour is", "colour"), ("What shape is", "shape"), ("How big is", "size")):
        if question.startswith(start):
            phrase = " ".join(words[len(start.split()) :])
            assert getattr(_only(phrase, things), field) not in phrase.split()
            return getattr(_only(phrase, things), field)
    if question.startswith("Is there"):
        assert words[2] == ("an" if words[3][0] in "aeiou" else "a")
        return "yes" if _fitting(" ".join(words[3:]), things) else "no"
    if question.startswith("Where is"):
        return _thirds(_only(" ".join(words[2:]), things))
    for side in ("left of", "right of", "above", "below"):
        if f" {side} " in question:
            first, second = question.rstrip("?").split(f" {side} ")
            b = _only(second, things)
            if first == "What is":
                others = [t for t in things if t is not b]
                assert all(abs(_beyond(side, t, b)) >= 0.09 for t in others)
                (there,) = [t for t in others if _beyond(side, t, b) > 0]
                return f"a {there.size} {there.colour} {there.shape}"
            a = _only(first.removeprefix("Is "), things)
            assert abs(_beyond(side, a, b)) >= 0.09
            return "yes" if _beyond(side, a, b) > 0 else "no"
    assert question.startswith(("What is at the ", "What is in the middle"))
    place = " ".join(words[4:])
    (there,) = [t for t in things if _thirds(t) == place]
    return f"a {there.size} {there.colour} {there.shape}"


def test_every_answer_is_found_a_second_way(asked):
    for scene, said in asked:
        assert len({question for question, _ in said}) == len(said)
        for question, answer in said:
            assert answer == _answer(question, scene), (question, scene)


def test_first_questions_are_balanced(asked):
    first = [pair for _, said in asked for pair in said[:5]]
    yes_no = Counter(answer for _, answer in first if answer in ("yes", "no"))
    assert 0.45 < yes_no["yes"] / yes_no.total() < 0.55
    starts = Counter(" ".join(question.split()[:2]) for question, _ in first)
    assert min(starts.values()) > 0.04 * len(first), starts
    for start in starts:
        answers = Counter(answer for question, answer in first if question.startswith(start))
        assert max(answers.values()) < 0.65 * answers.total(), (start, answers)


def test_no_background_comes_near_an_objects_colour():
    for bright, dim in TONES:
        for i in range(21):
            tone = [(i * a + (20 - i) * b) / 20 for a, b in zip(bright, dim)]
            assert all(math.dist(tone, rgb) > 75 for rgb in COLOURS.values()), tone


@pytest.mark.parametrize("size", [(160, 160), (96, 96), (97, 161)])
def test_pixels_have_the_colour_they_are_said_to_have(scenes, size):
    looked = right = 0
    for scene in scenes[:300]:
        picture = draw(scene, *size)
        assert picture.size == size and picture.mode == "RGB"
        for t in scene.things:
            band = 0.77 * t.radius if t.shape == "ring" else 0
            x, y = t.x * size[0] + band * min(size), t.y * size[1]
            pixel = picture.getpixel((round(x - 0.5), round(y - 0.5)))
            looked += 1
            right += min(COLOURS, key=lambda name: math.dist(pixel, COLOURS[name])) == t.colour
    assert right >= 0.99 * looked


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_only_plain_is_plain(background):
    for seed in range(10):
        shades = draw(Scene((), background, seed), 96, 96).convert("L").histogram()
        seen = [tone for tone, n in enumerate(shades) if n]
        assert (seen[-1] - seen[0] == 0) if background == "plain" else (seen[-1] - seen[0] > 30)


def test_any_size_but_the_tiny_draws():
    scene = random_scene(Random(5))
    for size in ((48, 48), (97, 161), (640, 480), (1024, 1024)):
        assert draw(scene, *size).size == size
    with pytest.raises(ValueError, match="8x8"):
        draw(scene, 8, 8)
