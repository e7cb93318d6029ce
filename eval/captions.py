"""Share of right captions and answers of the embedded model on freshly drawn scenes that its training never saw.

    python -m eval.captions --scenes 1000
    python -m eval.captions --compare --save            # every precision at every level of CPU instructions

By default there are five figures: captions that match word for word, the same on scenes with a color and shape that
training never combined ("withheld"), answers to questions of every kind, and answers to two kinds of questions about
where shapes are. Captions and the last two are also counted by the number of objects. Images are PNG files of 96 to 512
pixels a side.

--compare measures float32, bfloat16, int8 and int4 at every level of CPU instructions here (see eval.latency) beside
float32 by plain modules ("none"), one image at a time: the share of right captions, the share of that reference's
right captions that stay right ("kept"), and the root mean square difference of the first token's logits from the
reference's, relative to their standard deviation. Two more figures suit any model, as they need no right answers; as
in OpenVINO's who-what-benchmark they compare the greedy texts: means of the share of the reference's tokens before the
first one that differs ("prefix", its "FDT norm"), and of difflib's similarity of the tokens ("ratio"). The command
fails if int8 keeps less than 99%.
"""

import argparse
import io
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import partial
from itertools import zip_longest
from random import Random
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor

from eval.lib import command
from eval.lib.command import Measured, at_level, environment, levels_here, positive, progress, relative_error
from models.options import QUANTIZATIONS
from nanovlm import EMBEDDED, PROMPT
from nanovlm.captioner import Captioner
from nanovlm.cli.main import Parser
from nanovlm.console import table
from nanovlm.evaluation.metrics import intervals
from nanovlm.synthetic import Scene, caption, draw, questions, random_scene

BATCH_SIZE = 64
MIN_KEPT = 0.99  # by int8, of the captions that float32 has right
COMPARED = [(dtype, quantize) for quantize in (None, "int8", "int4") for dtype in ("float32", "bfloat16")]
REFERENCE = ("float32", None, "none")  # dtype, quantization and level
IMAGE_SIZES = (96, 512)  # pixels
N_COMPARED = 3  # relation questions of each kind about one scene
OBJECT_ROWS = ("one object", "two objects", "three objects", "four objects")
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
COLUMNS = {"right": ".1%", "kept": ".1%", "logits": ".2%", "prefix": ".1%", "ratio": ".1%"}


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
    hits = Counter(row for row, is_right in zip(rows, right) if is_right)
    totals = Counter(rows)
    numbered = set(totals) <= set(OBJECT_ROWS)
    ordered = sorted(totals, key=OBJECT_ROWS.index if numbered else lambda row: -totals[row])
    return {row: {"right": hits[row], "of": totals[row]} for row in ordered}


def measure(captioner: Captioner, n_scenes: int, n_questions: int, seed: str) -> dict:
    """Exact matches of each split and of its rows, and every miss as (split, prompt, truth, answer)."""
    results: dict = {"missed": []}
    for split, examples in make_splits(n_scenes, n_questions, seed).items():
        started = time.perf_counter()
        images = [example.image for example in examples]
        prompts = [example.prompt for example in examples]
        answers = list(captioner.captions(images, prompts, batch_size=BATCH_SIZE))
        right = [answer == example.truth for example, answer in zip(examples, answers)]
        rows = count_by_row([example.row for example in examples], right)
        results[split] = {"right": sum(right), "of": len(right), "rows": rows}
        results[split]["seconds"] = round(time.perf_counter() - started, 1)
        misses = zip(examples, answers, right)
        results["missed"] += [
            (split, one.prompt, one.truth, answer) for one, answer, is_right in misses if not is_right
        ]
    return results


def compare_precisions(
    n_scenes: int, seed: str, model: str | os.PathLike[str] = EMBEDDED
) -> dict[str, dict[str, float]]:
    """The figures of --compare by dtype, quantization and level, of which REFERENCE is the first."""
    rng = Random(f"quantised {seed}")
    scenes = [random_scene(rng) for _ in range(n_scenes)]
    images = [png(scene, rng) for scene in scenes]
    results = {}
    reference = None
    levels = levels_here() or ["none"]
    for dtype, quantize, level in [REFERENCE, *((*precision, level) for precision in COMPARED for level in levels)]:
        with at_level(level):
            captioner = Captioner.from_pretrained(model, "cpu", dtype, quantize=quantize)
        progress(name := " ".join(filter(None, (dtype, quantize, level))))
        answers = list(captioner.captions(images, batch_size=1))
        right = [answer == caption(scene) for answer, scene in zip(answers, scenes)]
        ids = [[*captioner.tokenizer.encode(answer), captioner.tokenizer.eos_token_id] for answer in answers]
        rows = [first_logits(captioner, image) for image in images[:BATCH_SIZE]]
        reference = reference or (right, ids, torch.cat(rows))
        pairs = [*zip(ids, reference[1])]
        results[name] = {
            "right": mean(right),
            "kept": sum(map(min, right, reference[0])) / max(1, sum(reference[0])),
            "logits": relative_error(torch.cat(rows), reference[2]),
            "prefix": mean(shared_prefix(*pair) for pair in pairs),
            "ratio": mean(SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs),
        }
    return results


def first_logits(captioner: Captioner, image: bytes) -> Tensor:
    """Logits (1, vocabulary) of the first token of a caption."""
    seen: list[Tensor] = []

    def see(ids: list[int], logits: Tensor) -> Tensor:
        seen.append(logits)
        return logits

    request = captioner.request(image, max_new_tokens=1)
    request.grammar = see
    for _ in captioner.generate([request]):
        pass
    return seen[0]


def shared_prefix(ids: Sequence[int], expected: Sequence[int]) -> float:
    """The share of the expected tokens before the first one that differs."""
    return next((i for i, (a, b) in enumerate(zip_longest(ids, expected)) if a != b), len(ids)) / len(expected)


def comparison_failures(results: dict[str, dict[str, float]]) -> list[str]:
    """Quantized precisions that keep too few of the reference's right captions."""
    lossy = [name for name in results if " int8 " in name and results[name]["kept"] < MIN_KEPT]
    return [f"{name} keeps less than {MIN_KEPT:.0%} of float32's right captions" for name in lossy]


def share(name: str, counts: dict) -> str:
    """A line with a share and its 95% interval."""
    right = counts["right"]
    n = counts["of"]
    low, high = intervals({name: right / n}, n)[name]
    return f"{name:28} {right / n:7.2%}  ({right} of {n}, 95% interval {100 * low:.1f} to {100 * high:.1f})"


def accuracy_table(results: dict, n_misses: int) -> str:
    lines = ["exact matches, greedy"]
    for split, name in SPLITS.items():
        if results[split]["of"]:
            lines.append(share(name, results[split]))
            lines += ["  " + share(row, counts) for row, counts in results[split]["rows"].items()]
    for split, prompt, truth, answer in results["missed"][:n_misses]:
        lines.append(f"missed in {split}: {prompt!r}\n  truth  {truth}\n  answer {answer}")
    return "\n".join(lines)


def comparison_table(results: dict[str, dict[str, float]]) -> str:
    rows = [[name, *(f"{row[column]:{form}}" for column, form in COLUMNS.items())] for name, row in results.items()]
    return table([["", *COLUMNS], *rows])


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--model", default=EMBEDDED, metavar="FOLDER_OR_HUB_ID", help="(default: the embedded model)")
    add("--scenes", type=positive, metavar="N", help="fresh scenes, and withheld ones (default: 1000, to compare 200)")
    add("--questions", type=positive, default=3, metavar="N", help="questions per scene (default: 3)")
    add("--quantize", choices=QUANTIZATIONS, help="quantize the weights")
    add("--compare", action="store_true", help="compare all precisions at all levels of the CPU")
    add("--seed", default="1", help="which scenes (default: 1)")
    add("--misses", type=int, default=0, metavar="N", help="show N misses")
    command.add_device_flags(parser)


def measure_flags(args: argparse.Namespace) -> Measured:
    """Measure what the flags name."""
    n = args.scenes or (200 if args.compare else 1000)
    if args.compare:
        results = compare_precisions(n, args.seed, args.model)
        return results, comparison_table(results), environment(levels=levels_here()), comparison_failures(results)
    captioner = Captioner.from_pretrained(args.model, args.device, args.dtype, quantize=args.quantize)
    where = environment(captioner.inference.device, captioner.inference.dtype)
    results = measure(captioner, n, args.questions, args.seed)
    return results, accuracy_table(results, args.misses), where, ()


main = partial(command.run, "captions", __doc__, add_flags, measure_flags)

if __name__ == "__main__":
    sys.exit(main())
