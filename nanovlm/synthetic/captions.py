"""A Scene becomes words: its caption, and the questions it answers beyond doubt."""

from itertools import permutations
from random import Random

from nanovlm.synthetic.scene import CLEAR, COLOURS, SAME, SHAPES, SIZES, WITHHELD, Scene, Shape

NUMBERS = ("none", "one", "two", "three", "four")
SIDES = ("left of", "right of", "above", "below")


def caption(scene: Scene) -> str:
    """Name every thing, from left to right, and the background."""
    names = [_a(thing.name) for thing in scene.things]
    told = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{told[0].upper()}{told[1:]} on a {scene.background} background."


def questions(scene: Scene, rng: Random) -> list[tuple[str, str]]:
    """Everything this scene answers beyond doubt, as (question, answer) in random order.

    Kinds take turns, and within a kind its answers do, so that whoever takes the first few sees every kind equally
    often and "yes" as often as "no". A withheld pair is asked about only where the scene shows it.
    """
    kinds = []
    for kind in (
        _total,
        _counts,
        _colours,
        _shapes,
        _sizes,
        _exists,
        _where,
        _what_at,
        _relations,
        _beside,
        _background,
    ):
        by_answer = {}
        for question, answer in kind(scene.things, rng, scene.background):
            by_answer.setdefault(answer, []).append((question, answer))
        for same in by_answer.values():
            rng.shuffle(same)
        kinds.append(_take_turns(list(by_answer.values()), rng))
    return _take_turns(kinds, rng)


def _take_turns(groups, rng):
    """The first of every group in random order, then the second of every group, and so on."""
    turns = []
    for i in range(max(map(len, groups), default=0)):
        turn = [group[i] for group in groups if i < len(group)]
        rng.shuffle(turn)
        turns += turn
    return turns


def _a(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


# Referring to one thing


def _fits(phrase: str, thing: Shape) -> bool:
    """Whether every word of "small red star" (or "red object") is true of this thing."""
    return all(word in (thing.size, thing.colour, thing.shape, "object") for word in phrase.split())


def _the(thing, things, rng, without=""):
    """A phrase that fits this thing alone: mostly the shortest, sometimes longer; None if there is none."""
    size, colour = thing.size, thing.colour
    shape = "object" if without == "shape" else thing.shape
    phrases = [shape, f"{colour} {shape}", f"{size} {shape}", f"{size} {colour} {shape}"]
    phrases = [p for p in phrases if p != "object" and not (without and getattr(thing, without) in p.split())]
    unique = [p for p in phrases if sum(_fits(p, other) for other in things) == 1]
    if not unique:
        return None
    shortest = min(len(p.split()) for p in unique)
    return "the " + rng.choice(unique if rng.random() < 0.3 else [p for p in unique if len(p.split()) == shortest])


def _asked(things, rng, question, attribute):
    """The question about an attribute, for every thing that can be named without it."""
    for thing in things:
        if name := _the(thing, things, rng, without=attribute):
            yield question.format(name), getattr(thing, attribute)


# The kinds of questions: (things, rng, background) -> (question, answer) pairs


def _total(things, rng, background):
    yield "How many objects are there?", NUMBERS[len(things)]


def _counts(things, rng, background):
    for colour in COLOURS:
        yield f"How many {colour} objects are there?", NUMBERS[sum(t.colour == colour for t in things)]
    for shape in SHAPES:
        plural = f"{shape}es" if shape.endswith("s") else f"{shape}s"
        yield f"How many {plural} are there?", NUMBERS[sum(t.shape == shape for t in things)]


def _colours(things, rng, background):
    return _asked(things, rng, "What colour is {}?", "colour")


def _shapes(things, rng, background):
    return _asked(things, rng, "What shape is {}?", "shape")


def _sizes(things, rng, background):
    return _asked(things, rng, "How big is {}?", "size")


def _exists(things, rng, background):
    """For every true phrase a false one of the same form, mostly one that is nearly true."""
    pairs = [(c, s) for c in COLOURS for s in SHAPES if (c, s) not in WITHHELD]
    forms = (
        [(s,) for s in SHAPES],
        pairs,
        [(size, *pair) for size in SIZES for pair in pairs],
    )
    for form in forms:
        length = len(form[0])
        shown = {(t.size, t.colour, t.shape)[-length:] for t in things}
        absent = [words for words in form if words not in shown]
        near = [words for words in absent if any(sum(map(str.__eq__, words, s)) == length - 1 for s in shown)]
        false = rng.sample(absent, min(len(shown), len(absent)))
        false = [rng.choice(near) if near and rng.random() < 0.7 else words for words in false]
        yield from ((f"Is there {_a(' '.join(words))}?", "yes") for words in sorted(shown))
        yield from ((f"Is there {_a(' '.join(words))}?", "no") for words in sorted(set(false)))


def _where(things, rng, background):
    for thing in things:
        name, place = _the(thing, things, rng), _place(thing)
        if name and place:
            yield f"Where is {name}?", place


def _what_at(things, rng, background):
    places = [_place(thing) for thing in things]
    if None in places:
        return
    for thing, place in zip(things, places):
        # "at the top" may be heard as the whole upper third: ask only where both readings have one answer
        if sum(place == other or place in other.split() for other in places) == 1:
            yield f"What is {'in' if place == 'middle' else 'at'} the {place}?", _a(thing.name)


def _place(thing):
    """One of nine places by thirds, or None when too near a border between two."""
    if any(abs(value - line) < SAME for value in (thing.x, thing.y) for line in (1 / 3, 2 / 3)):
        return None
    row = ("top", "", "bottom")[int(3 * thing.y)]
    column = ("left", "", "right")[int(3 * thing.x)]
    return f"{row} {column}".strip() or "middle"


def _relations(things, rng, background):
    for a, b in permutations(things, 2):
        names = _the(a, things, rng), _the(b, things, rng)
        for side in SIDES:
            if abs(_towards(side, a, b)) >= CLEAR and None not in names:
                yield f"Is {names[0]} {side} {names[1]}?", "yes" if _towards(side, a, b) > 0 else "no"


def _beside(things, rng, background):
    for thing in things:
        others = [other for other in things if other is not thing]
        for side in SIDES:
            steps = [_towards(side, other, thing) for other in others]
            there = [other for other, step in zip(others, steps) if step > 0]
            name = _the(thing, things, rng)
            if name and len(there) == 1 and all(abs(step) >= CLEAR for step in steps):
                yield f"What is {side} {name}?", _a(there[0].name)


def _towards(side, a, b):
    """How far a lies to that side of b."""
    return {"left of": b.x - a.x, "right of": a.x - b.x, "above": b.y - a.y, "below": a.y - b.y}[side]


def _background(things, rng, background):
    yield "What is the background like?", background
