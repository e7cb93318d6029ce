"""How often the embedded model is right on freshly drawn scenes that its training never saw.

    python -m eval.captions --scenes 1000
    python -m eval.captions --compare --save            # every precision at every level of CPU instructions
    python -m eval.captions --turns 6 --scenes 200      # questions in a conversation, beside the same questions alone

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

import os
import sys
import time
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from random import Random
from statistics import mean

import torch

from eval.lib import command
from eval.lib.command import positive, progress, relative_error, table
from eval.lib.hardware import at_level, environment, levels_here
from eval.lib.scene_splits import SPLITS, count_by_row, make_splits, png
from nanovlm import EMBEDDED, PROMPT
from nanovlm.captioner import Captioner
from nanovlm.chat_session import ChatSession
from nanovlm.cli.main import Parser
from nanovlm.errors import NanoVLMError
from nanovlm.evaluation.metrics import intervals
from nanovlm.options import QUANTIZATIONS
from nanovlm.synthetic import caption, questions, random_scene

BATCH_SIZE = 64
MAX_TURNS = 20  # every scene has at least as many questions
MIN_KEPT = 0.99  # by int8, of the captions that float32 has right
PRECISIONS = [(dtype, quantize) for quantize in (None, "int8", "int4") for dtype in ("float32", "bfloat16")]
REFERENCE = ("float32", None, "none")  # dtype, quantization and level
COLUMNS = {"right": ".1%", "kept": ".1%", "logits": ".2%", "prefix": ".1%", "ratio": ".1%"}


def measure(captioner: Captioner, n_scenes: int, n_questions: int, seed: str) -> dict:
    """Exact matches of each split and of its rows, and every miss as (split, prompt, truth, answer)."""
    results: dict = {"missed": []}
    for split, examples in make_splits(n_scenes, n_questions, seed).items():
        started = time.perf_counter()
        images, prompts = [example.image for example in examples], [example.prompt for example in examples]
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


def measure_turns(captioner: Captioner, n_scenes: int, n_turns: int, seed: str) -> dict[str, list[int]]:
    """Right answers by turn, in n_scenes conversations of n_turns questions, with the same questions asked alone.

    A conversation keeps the model's own earlier answers, right or wrong; one kind starts with a caption.
    """
    rng = Random(f"turns {seed}")
    right = {mode: [0] * n_turns for mode in ("alone", "one after another", "after a caption")}
    for _ in range(n_scenes):
        scene = random_scene(rng)
        image = png(scene, rng)
        prompts, truths = zip(*questions(scene, rng)[:n_turns])
        chat, captioned = ChatSession(captioner, [image]), ChatSession(captioner, [image])
        "".join(captioned.ask(PROMPT))
        answers = [captioner.ask(image, prompts)]
        answers += [["".join(session.ask(prompt)) for prompt in prompts] for session in (chat, captioned)]
        for counts, given in zip(right.values(), answers):
            for turn, (answer, truth) in enumerate(zip(given, truths)):
                counts[turn] += answer == truth
    return right


def compare_precisions(
    n_scenes: int, seed: str, model: str | os.PathLike[str] = EMBEDDED
) -> dict[str, dict[str, float]]:
    """The figures of --compare by dtype, quantization and level, of which REFERENCE is the first."""
    rng = Random(f"quantised {seed}")
    scenes = [random_scene(rng) for _ in range(n_scenes)]
    images = [png(scene, rng) for scene in scenes]
    results, reference = {}, None
    levels = levels_here() or ["none"]
    for dtype, quantize, level in [REFERENCE, *((*precision, level) for precision in PRECISIONS for level in levels)]:
        with at_level(level):
            captioner = Captioner.from_pretrained(model, "cpu", dtype, quantize=quantize)
        progress(name := " ".join(filter(None, (dtype, quantize, level))))
        answers = list(captioner.captions(images, batch_size=1))
        right = [answer == caption(scene) for answer, scene in zip(answers, scenes)]
        ids = [[*captioner.tokenizer.encode(answer), captioner.tokenizer.eos_token_id] for answer in answers]
        prompts = [captioner.prepare(image) for image in images[:BATCH_SIZE]]
        with torch.inference_mode():
            rows = [captioner.inference.prefill(torch.tensor([ids]), torch.cat(tiles))[0] for ids, tiles in prompts]
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


def shared_prefix(ids: Sequence[int], expected: Sequence[int]) -> float:
    """The share of the expected tokens before the first one that differs."""
    return next((i for i, (a, b) in enumerate(zip_longest(ids, expected)) if a != b), len(ids)) / len(expected)


def comparison_failures(results: dict[str, dict[str, float]]) -> list[str]:
    """Quantized precisions that keep too few of the reference's right captions."""
    lossy = [name for name in results if " int8 " in name and results[name]["kept"] < MIN_KEPT]
    return [f"{name} keeps less than {MIN_KEPT:.0%} of float32's right captions" for name in lossy]


def share(name: str, counts: dict) -> str:
    """A line with a share and its 95% interval."""
    right, n = counts["right"], counts["of"]
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


def turns_table(right: dict[str, list[int]], n_scenes: int) -> str:
    rows = [[f"of {n_scenes} answers", *(str(turn + 1) for turn in range(len(right["alone"])))]]
    return table(rows + [[mode, *(f"{n / n_scenes:.1%}" for n in counts)] for mode, counts in right.items()])


def comparison_table(results: dict[str, dict[str, float]]) -> str:
    rows = [[name, *(f"{row[column]:{form}}" for column, form in COLUMNS.items())] for name, row in results.items()]
    return table([["", *COLUMNS], *rows])


def make_captions_parser() -> Parser:
    parser = command.make_parser("captions", __doc__)
    add = parser.add_argument
    add("--model", default=EMBEDDED, metavar="FOLDER_OR_HUB_ID", help="(default: the embedded model)")
    add("--scenes", type=positive, metavar="N", help="fresh scenes, and withheld ones (default: 1000, to compare 200)")
    add("--questions", type=positive, default=3, metavar="N", help="questions per scene (default: 3)")
    add("--turns", type=positive, metavar="N", help="ask N questions about each scene in a conversation")
    add("--quantize", choices=QUANTIZATIONS, help="quantize the weights")
    add("--compare", action="store_true", help="compare all precisions at all levels of the CPU")
    add("--seed", default="1", help="which scenes (default: 1)")
    add("--misses", type=int, default=0, metavar="N", help="show N misses")
    command.add_device_flags(parser)
    command.add_save_flag(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_captions_parser()
    args = parser.parse_args(argv)
    n, seed = args.scenes or (200 if args.compare else 1000), args.seed
    if args.turns and args.turns > MAX_TURNS:
        parser.error(f"--turns {args.turns} is more than {MAX_TURNS}, for which every scene has questions")
    results: dict
    failures: list[str] = []
    try:
        if args.compare:
            where, results = environment(levels=levels_here()), compare_precisions(n, seed, args.model)
            text, failures = comparison_table(results), comparison_failures(results)
        else:
            captioner = Captioner.from_pretrained(args.model, args.device, args.dtype, quantize=args.quantize)
            where = environment(captioner.inference.device, captioner.inference.dtype)
            if args.turns:
                results = {"of": n, "right": measure_turns(captioner, n, args.turns, seed)}
                text = turns_table(results["right"], n)
            else:
                results = measure(captioner, n, args.questions, seed)
                text = accuracy_table(results, args.misses)
    except NanoVLMError as error:
        parser.error(str(error))
    return command.report(results, text, where, args.json, failures, args.save)


if __name__ == "__main__":
    sys.exit(main())
