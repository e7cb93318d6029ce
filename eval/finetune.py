"""Gain of fine-tuning on 600 small images that this project does not draw: scikit-learn's handwritten digits.

    python -m eval.finetune
    python -m eval.finetune --flags "--max-steps 100"

trains the embedded model by `train.py` with its defaults, or with --flags, and prints the share of the 1,197 other
digits whose answer is exactly right, and the share whose answer occurs in training. Beside it are two classifiers that
train nothing of the model: a support vector machine on pixels, and the nearest neighbor by the embedded model's image
embeddings. Needs the extra eval. docs/training.md says how long it takes.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from PIL import Image

from eval.lib.classification import Labeled, classify_pixels, share, train
from eval.lib.command import Measured, add_threads_flag, environment, run
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.cli.main import Parser
from nanovlm.console import table
from nanovlm.errors import needs_extra

N_TRAIN = 600
SIDE = 64  # pixels of an image, drawn as 8 x 8 squares
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SEED = "digits 1"


def write_digits(folder: Path) -> tuple[Labeled, Labeled]:
    """Write .png and .txt files to folder/train and folder/test; the digits to learn from, and those to test on."""
    with needs_extra("eval", "the digits"):
        from sklearn.datasets import load_digits
    data = load_digits()
    examples = [*zip((data.images * 15).astype("uint8"), (f"the digit {WORDS[i]}" for i in data.target))]
    Random(SEED).shuffle(examples)
    parts: dict[str, Labeled] = {"train": ([], []), "test": ([], [])}
    for i, (pixels, caption) in enumerate(examples):
        part = "train" if i < N_TRAIN else "test"
        path = folder / part / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(path)
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
        parts[part][0].append(str(path))
        parts[part][1].append(caption)
    return parts["train"], parts["test"]


def fine_tune(folder: Path, learned: Labeled, tested: Labeled, flags: Sequence[str]) -> dict[str, Any]:
    """The model's score on tested after `train.py` with flags in folder, and the CPU seconds that this took."""
    seconds = train(["--data", str(folder / "train"), "--out", str(folder / "out"), *flags])
    captioner = Captioner.from_pretrained(folder / "out", dtype="float32")
    answers = list(captioner.captions(tested[0], batch_size=64))
    known = fmean(answer in learned[1] for answer in answers)
    return share(answers, tested[1]) | {"known": known, "seconds": seconds}


def classify_embeddings(learned: Labeled, tested: Labeled) -> list[str]:
    """The nearest neighbor by cosine of the embedded model's image embeddings, without any training."""
    captioner = Captioner.from_pretrained(EMBEDDED, dtype="float32")

    def embeddings(paths: list[str]) -> torch.Tensor:
        tiles = [captioner.prepare(path)[1][0] for path in paths]
        with torch.no_grad():
            encoded = torch.cat([captioner.model.encode_images(tile).flatten(1) for tile in tiles])
        return torch.nn.functional.normalize(encoded - encoded.mean(), dim=-1)

    nearest = (embeddings(tested[0]) @ embeddings(learned[0]).T).argmax(1).tolist()
    return [learned[1][i] for i in nearest]


def measure(args: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        learned, tested = write_digits(folder)
        results = {
            "fine-tuned": fine_tune(folder, learned, tested, args.flags.split()),
            "SVM on pixels": share(classify_pixels(learned, tested), tested[1]),
            "neighbors": share(classify_embeddings(learned, tested), tested[1]),
        }
    rows = [["", "exact", "known"]]
    for name, scores in results.items():
        rows.append([name, *(f"{scores[key]:.1%}" if key in scores else "" for key in ("exact", "known"))])
    text = f"{table(rows)}\ntrained for {results['fine-tuned']['seconds']:,.0f} s of CPU time"
    return results, text, environment(), ()


def add_flags(parser: Parser) -> None:
    parser.add_argument("--flags", default="", metavar="'--max-steps N ...'", help="further flags of train.py")
    add_threads_flag(parser)


main = partial(run, "finetune", __doc__, add_flags, measure)

if __name__ == "__main__":
    sys.exit(main())
