"""The text of a scene: its caption, and the questions that it answers unambiguously."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import permutations
from random import Random
from typing import TypeVar

from nanovlm.synthetic.scene import CLEAR_OFFSET, COLORS, SAME_COLUMN, SHAPES, SIZES, TRAINED_PAIRS, Scene, Shape

NUMBERS = ("none", "one", "two", "three", "four")
RELATIONS = ("left of", "right of", "above", "below")

T = TypeVar("T")
Pairs = Iterable[tuple[str, str]]  # of a question and its answer


def caption(scene: Scene) -> str:
    """Name every shape, from left to right, and the background."""
    return f"{_listed([shape.name for shape in scene.shapes])} on a {scene.background} background."


def short_caption(scene: Scene) -> str:
    """Color and shape of everything, from left to right."""
    return f"{_listed([f'{shape.color} {shape.kind}' for shape in scene.shapes])}."


def _listed(phrases: Sequence[str]) -> str:
    """A small red star, a large ring and a cross."""
    *names, last = map(_with_article, phrases)
    text = " and ".join(filter(None, (", ".join(names), last)))
    return text[0].upper() + text[1:]


def _with_article(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def questions(scene: Scene, rng: Random) -> list[tuple[str, str]]:
    """(question, answer) pairs that this scene answers unambiguously, in random order.

    Kinds of questions take turns, and within a kind its answers do, so that the first few questions show every kind
    equally often and "yes" as often as "no". A withheld pair is asked about only where the scene shows it.
    """
    groups = []
    for make_pairs in QUESTION_KINDS:
        by_answer: dict[str, list[tuple[str, str]]] = {}
        for question, answer in make_pairs(scene, rng):
            by_answer.setdefault(answer, []).append((question, answer))
        for pairs in by_answer.values():
            rng.shuffle(pairs)
        groups.append(_take_turns(list(by_answer.values()), rng))
    return _take_turns(groups, rng)


def _take_turns(groups: Sequence[Sequence[T]], rng: Random) -> list[T]:
    """The first item of every group in random order, then the second of every group, and so on."""
    items = []
    for i in range(max(map(len, groups), default=0)):
        turn = [group[i] for group in groups if i < len(group)]
        rng.shuffle(turn)
        items += turn
    return items


def _unique_phrase(shape: Shape, shapes: Sequence[Shape], rng: Random, without: str = "") -> str | None:
    """A phrase that fits this shape alone, mostly the shortest, without telling an attribute; None if there is none."""
    size = shape.size
    color = shape.color
    kind = "object" if without == "kind" else shape.kind
    phrases = [kind, f"{color} {kind}", f"{size} {kind}", f"{size} {color} {kind}"]
    phrases = [p for p in phrases if p != "object" and not (without and getattr(shape, without) in p.split())]
    unique = [p for p in phrases if sum({*p.split()} <= {"object", *s.name.split()} for s in shapes) == 1]
    if not unique:
        return None
    shortest = min(len(p.split()) for p in unique)
    return "the " + rng.choice(unique if rng.random() < 0.3 else [p for p in unique if len(p.split()) == shortest])


# The kinds of questions: (scene, rng) -> (question, answer) pairs


def _attribute(scene: Scene, rng: Random, question: str, attribute: str) -> Pairs:
    """The question about an attribute, for every shape that can be referred to without it."""
    for shape in scene.shapes:
        if phrase := _unique_phrase(shape, scene.shapes, rng, without=attribute):
            yield question.format(phrase), getattr(shape, attribute)


def _counts(scene: Scene, rng: Random) -> Pairs:
    for color in COLORS:
        yield f"How many {color} objects are there?", NUMBERS[sum(shape.color == color for shape in scene.shapes)]
    for kind in SHAPES:
        plural = f"{kind}es" if kind.endswith("s") else f"{kind}s"
        yield f"How many {plural} are there?", NUMBERS[sum(shape.kind == kind for shape in scene.shapes)]


def _exists(scene: Scene, rng: Random) -> Pairs:
    """Ask about every true phrase, and about a false one of the same form, which is mostly nearly true."""
    forms: tuple[list[tuple[str, ...]], ...] = (
        [(kind,) for kind in SHAPES],
        [*TRAINED_PAIRS],
        [(size, *pair) for size in SIZES for pair in TRAINED_PAIRS],
    )
    for phrases in forms:
        length = len(phrases[0])
        true = {tuple(shape.name.split()[-length:]) for shape in scene.shapes}
        absent = [words for words in phrases if words not in true]
        near = [words for words in absent if any(sum(map(str.__eq__, words, t)) == length - 1 for t in true)]
        false = rng.sample(absent, min(len(true), len(absent)))
        false = [rng.choice(near) if near and rng.random() < 0.7 else words for words in false]
        yield from ((f"Is there {_with_article(' '.join(words))}?", "yes") for words in sorted(true))
        yield from ((f"Is there {_with_article(' '.join(words))}?", "no") for words in sorted(set(false)))


def _positions(scene: Scene, rng: Random) -> Pairs:
    for shape in scene.shapes:
        phrase = _unique_phrase(shape, scene.shapes, rng)
        position = _position(shape)
        if phrase and position:
            yield f"Where is {phrase}?", position


def _shapes_at(scene: Scene, rng: Random) -> Pairs:
    positions = [position for shape in scene.shapes if (position := _position(shape))]
    if len(positions) < len(scene.shapes):
        return
    for shape, position in zip(scene.shapes, positions):
        # "at the top" may be read as the whole upper third: ask only where both readings have one answer
        if sum(position == other or position in other.split() for other in positions) == 1:
            preposition = "in" if position == "middle" else "at"
            yield f"What is {preposition} the {position}?", _with_article(shape.name)


def _position(shape: Shape) -> str | None:
    """One of nine positions by thirds, or None if the shape is too near a border between two."""
    if any(abs(value - border) < SAME_COLUMN for value in (shape.x, shape.y) for border in (1 / 3, 2 / 3)):
        return None
    row = ("top", "", "bottom")[int(3 * shape.y)]
    column = ("left", "", "right")[int(3 * shape.x)]
    return f"{row} {column}".strip() or "middle"


def _relations(scene: Scene, rng: Random) -> Pairs:
    for a, b in permutations(scene.shapes, 2):
        first = _unique_phrase(a, scene.shapes, rng)
        second = _unique_phrase(b, scene.shapes, rng)
        for relation in RELATIONS:
            offset = _offset(relation, a, b)
            if abs(offset) >= CLEAR_OFFSET and first and second:
                yield f"Is {first} {relation} {second}?", "yes" if offset > 0 else "no"


def _neighbors(scene: Scene, rng: Random) -> Pairs:
    for shape in scene.shapes:
        for relation in RELATIONS:
            offsets = {other: _offset(relation, other, shape) for other in scene.shapes if other is not shape}
            there = [other for other, offset in offsets.items() if offset > 0]
            phrase = _unique_phrase(shape, scene.shapes, rng)
            if phrase and len(there) == 1 and all(abs(offset) >= CLEAR_OFFSET for offset in offsets.values()):
                yield f"What is {relation} {phrase}?", _with_article(there[0].name)


def _offset(relation: str, a: Shape, b: Shape) -> float:
    """Distance by which a is left of, right of, above or below b; negative on the other side."""
    return {"left of": b.x - a.x, "right of": a.x - b.x, "above": b.y - a.y, "below": a.y - b.y}[relation]


# The order is part of the training data: it decides which random numbers each kind draws.
QUESTION_KINDS: tuple[Callable[[Scene, Random], Pairs], ...] = (
    lambda scene, rng: [("How many objects are there?", NUMBERS[len(scene.shapes)])],
    _counts,
    partial(_attribute, question="What colour is {}?", attribute="color"),
    partial(_attribute, question="What shape is {}?", attribute="kind"),
    partial(_attribute, question="How big is {}?", attribute="size"),
    _exists,
    _positions,
    _shapes_at,
    _relations,
    _neighbors,
    lambda scene, rng: [("What is the background like?", scene.background)],
)
