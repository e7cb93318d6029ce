"""Test examples about drawn scenes, and counts of the right answers, by kind of question and number of objects."""

import io
import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from nanovlm import PROMPT
from nanovlm.synthetic import Scene, caption, draw, questions, random_scene

IMAGE_SIZES = (96, 512)  # pixels
N_COMPARED = 3  # relation questions of each kind about one scene
OBJECT_ROWS = ("one object", "two objects", "three objects", "four objects")
RELATIONS, NEIGHBORS = "Is X left of Y?", "What is left of X?"
QUESTION_KINDS = {  # every other kind is named by its first two words
    RELATIONS: r"Is the .+ (left of|right of|above|below) the ",
    NEIGHBORS: r"What is (left of|right of|above|below) the ",
    "What is at the top?": r"What is (at|in) the ",
    "What is the background?": r"What is the background",
}
SPLITS = {
    "captions": "captions",
    "withheld": "captions, withheld pairs",
    "questions": "answers to questions",
    "relations": RELATIONS,
    "neighbors": NEIGHBORS,
}


class Example(NamedTuple):
    """An image file, a prompt, the right answer, and the row of the results that it counts in."""

    image: bytes
    prompt: str
    truth: str
    row: str


def png(scene: Scene, rng: Random) -> bytes:
    """The scene as a PNG file of random size, from 4:3 to 3:4."""
    width = rng.randint(*IMAGE_SIZES)
    height = min(IMAGE_SIZES[1], max(IMAGE_SIZES[0], round(width * rng.uniform(0.75, 1.33))))
    file = io.BytesIO()
    draw(scene, width, height).save(file, "png")
    return file.getvalue()


def make_splits(n_scenes: int, n_questions: int, seed: str) -> dict[str, list[Example]]:
    """Captions of n_scenes scenes, captions of as many withheld ones, and questions about the former.

    "questions" has n_questions of all kinds about each scene, "relations" and "neighbors" up to N_COMPARED of their
    kind about each scene of two objects or more.
    """
    rng = Random(f"eval {seed}")
    scenes = [random_scene(rng) for _ in range(n_scenes)]
    images = [png(scene, rng) for scene in scenes]
    withheld = [random_scene(rng, withheld=True) for _ in range(n_scenes)]
    others = [png(scene, rng) for scene in withheld]
    splits: dict[str, list[Example]] = {name: [] for name in SPLITS}
    for split, drawn in (("captions", zip(images, scenes)), ("withheld", zip(others, withheld))):
        splits[split] = [Example(image, PROMPT, caption(scene), object_row(scene)) for image, scene in drawn]
    for image, scene in zip(images, scenes):
        asked = [Example(image, *pair, question_kind(pair[0])) for pair in questions(scene, rng)]
        splits["questions"] += asked[:n_questions]
        for split in ("relations", "neighbors"):
            compared = [example for example in asked if example.row == SPLITS[split]][:N_COMPARED]
            splits[split] += [example._replace(row=object_row(scene)) for example in compared]
    return splits


def object_row(scene: Scene) -> str:
    """The name of the row for scenes of this many objects."""
    return OBJECT_ROWS[len(scene.shapes) - 1]


def question_kind(question: str) -> str:
    """The name of a question's kind, such as "How many"."""
    kinds = (kind for kind, pattern in QUESTION_KINDS.items() if re.match(pattern, question))
    return next(kinds, " ".join(question.split()[:2]))


def count_by_row(rows: Sequence[str], right: Sequence[bool]) -> dict[str, dict[str, int]]:
    """Right answers of each row, "right" and "of": numbers of objects in order, any other rows by size."""
    hits, totals = Counter(row for row, is_right in zip(rows, right) if is_right), Counter(rows)
    numbered = set(totals) <= set(OBJECT_ROWS)
    ordered = sorted(totals, key=OBJECT_ROWS.index if numbered else lambda row: -totals[row])
    return {row: {"right": hits[row], "of": totals[row]} for row in ordered}
