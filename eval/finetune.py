"""Gain of fine-tuning on 600 small images that this project does not draw: scikit-learn's handwritten digits.

    python -m eval.finetune
    python -m eval.finetune --flags "--max-steps 100"

trains the embedded model by `train.py` with its defaults, or with --flags, and prints the share of the 1,197 other
digits whose answer is exactly right, and the share whose answer occurs in training. Beside it are two classifiers that
train nothing of the model: a support vector machine on pixels, and the nearest neighbor by the embedded model's image
embeddings. Needs the extra eval. With the defaults it took 10 minutes on one thread of an AMD EPYC (Zen 5).
"""

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from operator import eq
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from PIL import Image

from eval.lib.command import add_threads_flag, environment, make_parser, progress, report, table
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.cli.main import Parser, run_verb
from nanovlm.console import print_error
from nanovlm.errors import MissingExtraError, NanoVLMError, TrainingError
from nanovlm.processing.image_loading import load_image

N_TRAIN = 600
SIDE = 64  # pixels of an image, drawn as 8 x 8 squares
PIXELS = 32  # side of the images that the support vector machine sees
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
BATCH_SIZE = 64
SEED = "digits 1"

Digits = tuple[list[Path], list[str]]  # images and their captions


def write_digits(folder: Path) -> tuple[Digits, Digits]:
    """Write .png and .txt files to folder/train and folder/test; the digits to learn from, and those to test on."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError("the digits need scikit-learn: pip install 'nanovlm[eval]'") from None
    data = load_digits()
    examples = [*zip((data.images * 15).astype("uint8"), (f"the digit {WORDS[i]}" for i in data.target))]
    Random(SEED).shuffle(examples)
    train, test = (folder / part for part in ("train", "test"))
    return _write(train, examples[:N_TRAIN]), _write(test, examples[N_TRAIN:])


def _write(folder: Path, examples: list) -> Digits:
    folder.mkdir(parents=True)
    paths = [folder / f"{i:04}.png" for i in range(len(examples))]
    for path, (pixels, caption) in zip(paths, examples):
        Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(path)
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return paths, [caption for _, caption in examples]


def measure(folder: Path, flags: Sequence[str]) -> dict[str, dict[str, float]]:
    """Train in folder by `train.py` with flags; the scores of the model and of both classifiers."""
    train, test = write_digits(folder)
    argv = ["--data", str(folder / "train"), "--out", str(folder / "out"), *flags]
    progress(f"train.py {' '.join(argv)}")
    started = time.perf_counter()
    if code := run_verb("train", argv):
        raise TrainingError(f"train.py ended with exit code {code}")
    seconds = time.perf_counter() - started
    return {
        "fine-tuned": score(folder / "out", train, test) | {"seconds": round(seconds, 1)},
        "SVM on pixels": classify_pixels(train, test),
        "neighbors": classify_embeddings(train, test),
    }


def score(model: Path, train: Digits, test: Digits) -> dict[str, float]:
    """The shares of test images whose answer is right, and whose answer is one of the training captions."""
    captioner = Captioner.from_pretrained(model, dtype="float32")
    (_, known), (paths, truths) = train, test
    answers = list(captioner.captions(list(map(str, paths)), batch_size=BATCH_SIZE))
    return {"exact": fmean(map(eq, answers, truths)), "known": fmean(answer in known for answer in answers)}


def classify_pixels(train: Digits, test: Digits) -> dict[str, float]:
    """scikit-learn's support vector machine on 32 x 32 RGB pixels."""
    from sklearn.svm import SVC

    def pixels(paths: list[Path]) -> list[list[float]]:
        images = (load_image(path).convert("RGB").resize((PIXELS, PIXELS)) for path in paths)
        return [[value / 255 for value in image.tobytes()] for image in images]

    (known_paths, known), (paths, truths) = train, test
    return {"exact": float(SVC(C=10).fit(pixels(known_paths), known).score(pixels(paths), truths))}


def classify_embeddings(train: Digits, test: Digits) -> dict[str, float]:
    """The nearest neighbor by cosine of the embedded model's image embeddings, without any training."""
    captioner = Captioner.from_pretrained(EMBEDDED, dtype="float32")

    def embeddings(paths: list[Path]) -> torch.Tensor:
        tiles = [captioner.prepare(str(path))[1][0] for path in paths]
        with torch.no_grad():
            encoded = torch.cat([captioner.model.encode_images(tile).flatten(1) for tile in tiles])
        return torch.nn.functional.normalize(encoded - encoded.mean(), dim=-1)

    (known_paths, known), (paths, truths) = train, test
    nearest = (embeddings(paths) @ embeddings(known_paths).T).argmax(1).tolist()
    return {"exact": fmean(known[i] == truth for i, truth in zip(nearest, truths))}


def run(args: Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), args.flags.split())
    rows = [["", "exact", "known"]]
    for name, scores in results.items():
        rows.append([name, *(f"{scores[key]:.1%}" if key in scores else "" for key in ("exact", "known"))])
    text = f"{table(rows)}\ntrained for {results['fine-tuned']['seconds']:,.0f} s"
    return report(results, text, environment("cpu"), args.json)


def make_finetune_parser() -> Parser:
    parser = make_parser("finetune", __doc__)
    parser.add_argument("--flags", default="", metavar="'--max-steps N ...'", help="further flags of train.py")
    add_threads_flag(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_finetune_parser()
    args = parser.parse_args(argv)
    try:
        return run(args)
    except NanoVLMError as error:
        print_error(f"{parser.prog}: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
