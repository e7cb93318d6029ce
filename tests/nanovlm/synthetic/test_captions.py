"""Captions and questions, checked against the shapes' coordinates and attributes by a second implementation."""

import math
from itertools import combinations

from nanovlm.synthetic import WITHHELD, caption, names_withheld


def test_training_scenes_neither_show_nor_mention_a_withheld_pair(asked):
    names = [" ".join(pair) for pair in WITHHELD]
    for scene, pairs in asked:
        text = " ".join([caption(scene), *(f"{question} {answer}" for question, answer in pairs)])
        assert not names_withheld(scene) and not any(name in text for name in names)


def test_caption_names_shapes_from_left_to_right_and_top_to_bottom(scenes):
    for scene in scenes:
        for a, b in combinations(scene.shapes, 2):  # a is named before b
            dx, dy = b.x - a.x, b.y - a.y
            assert dx >= 0.09 or (abs(dx) < 0.035 and dy >= 0.15)
        names = [f"{'an' if t.size[0] in 'aeiou' else 'a'} {t.size} {t.color} {t.kind}" for t in scene.shapes]
        assert len(set(names)) == len(names)
        text = caption(scene)
        assert text.endswith(f" on a {scene.background} background.") and text.startswith("A ")
        starts = [text.lower().index(name) for name in names]
        assert starts == sorted(starts)
        assert (text.count(","), text.count(" and ")) == (max(0, len(names) - 2), int(len(names) > 1))


def fitting_shapes(phrase, shapes):
    words = phrase.removeprefix("the ").replace("object", "").split()
    return [t for t in shapes if {*words} <= {t.size, t.color, t.kind}]


def only_shape(phrase, shapes):
    (shape,) = fitting_shapes(phrase, shapes)
    return shape


def offset_to(side, a, b):
    """How far a lies on that side of b; negative on the other side."""
    return {"left": b.x - a.x, "right": a.x - b.x, "above": b.y - a.y, "below": a.y - b.y}[side.split()[0]]


POSITIONS = [["top left", "top", "top right"], ["left", "middle", "right"], ["bottom left", "bottom", "bottom right"]]


def position_of(t):
    assert all(abs(v - line) >= 0.035 for v in (t.x, t.y) for line in (1 / 3, 2 / 3))
    return POSITIONS[math.floor(t.y * 3)][math.floor(t.x * 3)]


def expected_answer(question, scene):
    """The answer, parsed from the question's text and looked up in the shapes."""
    shapes, words = scene.shapes, question.rstrip("?").split()
    numbers = ["none", "one", "two", "three", "four"]
    if question == "What is the background like?":
        return scene.background
    if question.startswith("How many"):
        phrase = " ".join(words[2:-2]).replace("crosses", "cross")
        phrase = phrase if phrase == "cross" else phrase.removesuffix("s")
        return numbers[len(fitting_shapes(phrase, shapes))]
    for start, field in (("What colour is", "color"), ("What shape is", "kind"), ("How big is", "size")):
        if question.startswith(start):
            phrase = " ".join(words[len(start.split()) :])
            assert getattr(only_shape(phrase, shapes), field) not in phrase.split()
            return getattr(only_shape(phrase, shapes), field)
    if question.startswith("Is there"):
        assert words[2] == ("an" if words[3][0] in "aeiou" else "a")
        return "yes" if fitting_shapes(" ".join(words[3:]), shapes) else "no"
    if question.startswith("Where is"):
        return position_of(only_shape(" ".join(words[2:]), shapes))
    for side in ("left of", "right of", "above", "below"):
        if f" {side} " in question:
            first, second = question.rstrip("?").split(f" {side} ")
            b = only_shape(second, shapes)
            if first == "What is":
                others = [t for t in shapes if t is not b]
                assert all(abs(offset_to(side, t, b)) >= 0.09 for t in others)
                (there,) = [t for t in others if offset_to(side, t, b) > 0]
                return f"a {there.size} {there.color} {there.kind}"
            a = only_shape(first.removeprefix("Is "), shapes)
            assert abs(offset_to(side, a, b)) >= 0.09
            return "yes" if offset_to(side, a, b) > 0 else "no"
    assert question.startswith(("What is at the ", "What is in the middle"))
    position = " ".join(words[4:])
    (there,) = [t for t in shapes if position_of(t) == position]
    return f"a {there.size} {there.color} {there.kind}"


def test_every_answer_is_right(asked):
    for scene, pairs in asked:
        assert len({question for question, _ in pairs}) == len(pairs)
        for question, answer in pairs:
            assert answer == expected_answer(question, scene), (question, scene)
