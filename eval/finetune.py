"""Gain of fine-tuning on 600 small images that this project does not draw: scikit-learn's handwritten digits.

    python -m eval.finetune
    python -m eval.finetune --flags "--max-steps 100"

trains the embedded model by `train.py` with its defaults, or with --flags, and prints the share of the 1,197 other
digits whose answer is exactly right, and the share whose answer occurs in training. Beside it are two classifiers that
train nothing of the model: a support vector machine on pixels, and the nearest neighbor by the embedded model's image
embeddings. Needs the extra eval. docs/training.md says how long it takes.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from PIL import Image

from eval.lib.command import add_threads_flag, environment, make_parser, progress, report, table
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.cli.main import run_verb
from nanovlm.console import print_error
from nanovlm.errors import MissingExtraError, NanoVLMError, TrainingError
from nanovlm.processing.image_loading import load_image

N_TRAIN = 600
SIDE = 64  # pixels of an image, drawn as 8 x 8 squares
PIXELS = 32  # side of the images that the support vector machine sees
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SEED = "digits 1"

Digits = tuple[list[str], list[str]]  # paths of images, and their captions


def write_digits(folder: Path) -> tuple[Digits, Digits]:
    """Write .png and .txt files to folder/train and folder/test; the digits to learn from, and those to test on."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError("the digits need scikit-learn: pip install 'nanovlm[eval]'") from None
    data = load_digits()
    examples = [*zip((data.images * 15).astype("uint8"), (f"the digit {WORDS[i]}" for i in data.target))]
    Random(SEED).shuffle(examples)
    parts: dict[str, Digits] = {"train": ([], []), "test": ([], [])}
    for i, (pixels, caption) in enumerate(examples):
        part = "train" if i < N_TRAIN else "test"
        path = folder / part / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(path)
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
        parts[part][0].append(str(path))
        parts[part][1].append(caption)
    return parts["train"], parts["test"]


def fine_tune(folder: Path, train: Digits, test: Digits, flags: Sequence[str]) -> dict[str, float]:
    """The model's score on test after `train.py` with flags in folder, and the CPU seconds that this took."""
    argv = ["--data", str(folder / "train"), "--out", str(folder / "out"), *flags]
    progress(f"train.py {' '.join(argv)}")
    before = sum(os.times()[:4])  # of this process and of its workers
    if code := run_verb("train", argv):
        raise TrainingError(f"train.py ended with exit code {code}")
    seconds = sum(os.times()[:4]) - before
    captioner = Captioner.from_pretrained(folder / "out", dtype="float32")
    answers = list(captioner.captions(test[0], batch_size=64))
    return score(answers, test) | {"known": fmean(answer in train[1] for answer in answers), "seconds": seconds}


def score(answers: Sequence[str], test: Digits) -> dict[str, float]:
    return {"exact": fmean(answer == truth for answer, truth in zip(answers, test[1], strict=True))}


def classify_pixels(train: Digits, test: Digits) -> dict[str, float]:
    """scikit-learn's support vector machine on 32 x 32 RGB pixels."""
    from sklearn.svm import SVC

    def pixels(paths: list[str]) -> list[list[float]]:
        images = (load_image(path).convert("RGB").resize((PIXELS, PIXELS)) for path in paths)
        return [[value / 255 for value in image.tobytes()] for image in images]

    return score(SVC(C=10).fit(pixels(train[0]), train[1]).predict(pixels(test[0])), test)


def classify_embeddings(train: Digits, test: Digits) -> dict[str, float]:
    """The nearest neighbor by cosine of the embedded model's image embeddings, without any training."""
    captioner = Captioner.from_pretrained(EMBEDDED, dtype="float32")

    def embeddings(paths: list[str]) -> torch.Tensor:
        tiles = [captioner.prepare(path)[1][0] for path in paths]
        with torch.no_grad():
            encoded = torch.cat([captioner.model.encode_images(tile).flatten(1) for tile in tiles])
        return torch.nn.functional.normalize(encoded - encoded.mean(), dim=-1)

    nearest = (embeddings(test[0]) @ embeddings(train[0]).T).argmax(1).tolist()
    return score([train[1][i] for i in nearest], test)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("finetune", __doc__)
    parser.add_argument("--flags", default="", metavar="'--max-steps N ...'", help="further flags of train.py")
    add_threads_flag(parser)
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            train, test = write_digits(folder)
            results = {
                "fine-tuned": fine_tune(folder, train, test, args.flags.split()),
                "SVM on pixels": classify_pixels(train, test),
                "neighbors": classify_embeddings(train, test),
            }
    except NanoVLMError as error:
        print_error(f"{parser.prog}: {error}")
        return error.exit_code
    rows = [["", "exact", "known"]]
    for name, scores in results.items():
        rows.append([name, *(f"{scores[key]:.1%}" if key in scores else "" for key in ("exact", "known"))])
    text = f"{table(rows)}\ntrained for {results['fine-tuned']['seconds']:,.0f} s of CPU time"
    return report(results, text, environment("cpu"), args.json)


if __name__ == "__main__":
    sys.exit(main())
