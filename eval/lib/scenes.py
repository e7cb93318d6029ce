"""Captions of freshly drawn scenes, and questions about them: what eval.captions and eval.speedup ask."""

import io
import re
from random import Random
from typing import NamedTuple

from nanovlm import PROMPT
from nanovlm.console import count
from nanovlm.synthetic import Scene, caption, draw, questions, random_scene

IMAGE_SIZES = (96, 512)  # pixels
N_QUESTIONS = 3  # of all kinds about a scene, and of each of the two kinds about where shapes are
RELATIONS = "Is X left of Y?"
NEIGHBORS = "What is left of X?"
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
    """An image or its file, a prompt or the model's own, the right answer, and the row of results it counts in."""

    image: bytes | str
    prompt: str | None
    truth: str
    row: str


def png(scene: Scene, rng: Random) -> bytes:
    """The scene as a PNG file of random size, from 4:3 to 3:4."""
    width = rng.randint(*IMAGE_SIZES)
    height = min(IMAGE_SIZES[1], max(IMAGE_SIZES[0], round(width * rng.uniform(0.75, 1.33))))
    file = io.BytesIO()
    draw(scene, width, height).save(file, "png")
    return file.getvalue()


def make_splits(n_scenes: int, n_questions: int = N_QUESTIONS, seed: str = "eval 1") -> dict[str, list[Example]]:
    """Captions of n_scenes scenes, captions of as many withheld ones, and questions about the former.

    "questions" has n_questions of all kinds about each scene, "relations" and "neighbors" up to N_QUESTIONS of their
    kind about each scene of two objects or more; without any, they are left out.
    """
    rng = Random(seed)
    scenes = [random_scene(rng) for _ in range(n_scenes)]
    images = [png(scene, rng) for scene in scenes]
    withheld = [random_scene(rng, withheld=True) for _ in range(n_scenes)]
    others = [png(scene, rng) for scene in withheld]
    splits: dict[str, list[Example]] = {name: [] for name in SPLITS}

    def n_objects(scene: Scene) -> str:
        return count(len(scene.shapes), "object")

    for split, drawn in (("captions", zip(images, scenes)), ("withheld", zip(others, withheld))):
        splits[split] = [Example(image, PROMPT, caption(scene), n_objects(scene)) for image, scene in drawn]
    for image, scene in zip(images, scenes):
        asked = [Example(image, *pair, question_kind(pair[0])) for pair in questions(scene, rng)]
        splits["questions"] += asked[:n_questions]
        for split in ("relations", "neighbors"):
            compared = [example for example in asked if example.row == SPLITS[split]][:N_QUESTIONS]
            splits[split] += [example._replace(row=n_objects(scene)) for example in compared]
    return {split: examples for split, examples in splits.items() if examples}


def question_kind(question: str) -> str:
    """The name of a question's kind, such as "How many"."""
    kinds = (kind for kind, pattern in QUESTION_KINDS.items() if re.match(pattern, question))
    return next(kinds, " ".join(question.split()[:2]))
