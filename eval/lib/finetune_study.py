"""Default settings of `train.py` beside other settings and simple classifiers, on the data sets of `study_sets`."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eval.lib.command import progress
from eval.lib.study_sets import STUDY_SETS, read_study_set, write_study_set
from eval.lib.training_race import MakeRun, TrainingSetup, race
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.cli.main import run_verb
from nanovlm.errors import TrainingError
from nanovlm.processing.image_loading import load_image
from nanovlm.training.config import FINETUNING

BATCH_SIZE = 64
PIXELS = 32  # side of the images that the classifiers of pixels see
WAYS: dict[str, list[str]] = {
    "default": [],
    "adamw": ["--optimizer", "adamw", "--lr", "8e-4"],
    "muon, half the rate": ["--optimizer", "muon", "--lr", "2.5e-4"],
    "muon, twice the rate": ["--optimizer", "muon", "--lr", "1e-3"],
    "adapters": ["--lora-rank", "16"],
}


def study(archives: Path, ways: Sequence[str], flags: Sequence[str]) -> dict[str, dict]:
    """For each data set and way: the shares of exact answers and of answers that occur in training, and seconds."""
    results: dict[str, dict] = {}
    for name in STUDY_SETS:
        with tempfile.TemporaryDirectory() as folder:
            train, test = write_study_set(name, archives, Path(folder) / "data")
            found = results[name] = {}
            for way in ways or WAYS:
                out, started = Path(folder, way.replace(" ", "-")), time.perf_counter()
                argv = ["--data", str(train), "--out", str(out), *WAYS[way], *flags]
                progress(f"{name}, {way}: train.py {' '.join(argv)}")
                if code := run_verb("train", argv):
                    raise TrainingError(f"{name}, {way}: train.py ended with exit code {code}")
                seconds = time.perf_counter() - started
                found[way] = score(out, train, test) | {"seconds": round(seconds, 1)}
            found |= {"SVM on pixels": classify_pixels(train, test), "neighbors": classify_embeddings(train, test)}
    return results


def race_study(archives: Path, loops: dict[str, MakeRun], seconds: float, settings: dict[str, Any]) -> dict[str, dict]:
    """The same shares for each data set and training loop, of the embedded model after `seconds` of training."""
    results: dict[str, dict] = {}
    for name in STUDY_SETS:
        with tempfile.TemporaryDirectory() as folder:
            train, test = write_study_set(name, archives, Path(folder) / "data")
            setup = TrainingSetup(EMBEDDED, train, random_affine=FINETUNING.random_affine, **settings)
            progress(f"{name}: {', '.join(loops)}")
            found, runs = race(setup, loops, Path(folder), None, seconds)
            results[name] = {
                result.name: score(run.save(), train, test) | {"steps": len(result.seconds)}
                for result, run in zip(found, runs)
            }
    return results


def score(model: Path, train: Path, test: Path) -> dict[str, float]:
    """The shares of test images whose answer is right, and whose answer is one of the training captions."""
    captioner = Captioner.from_pretrained(model, dtype="float32")
    paths, captions = zip(*read_study_set(test))
    answers = list(captioner.captions(list(map(str, paths)), batch_size=BATCH_SIZE))
    known = {caption for _, caption in read_study_set(train)}
    n = len(answers)
    return {
        "exact": sum(answer == caption for answer, caption in zip(answers, captions)) / n,
        "known": sum(answer in known for answer in answers) / n,
    }


def classify_pixels(train: Path, test: Path) -> dict[str, float]:
    """scikit-learn's support vector machine on 32 x 32 RGB pixels."""
    from sklearn.svm import SVC

    def pixels(folder: Path) -> list[list[float]]:
        images = (load_image(path).convert("RGB").resize((PIXELS, PIXELS)) for path, _ in read_study_set(folder))
        return [[value / 255 for value in image.tobytes()] for image in images]

    model = SVC(C=10).fit(pixels(train), [caption for _, caption in read_study_set(train)])
    return {"exact": float(model.score(pixels(test), [caption for _, caption in read_study_set(test)]))}


def classify_embeddings(train: Path, test: Path) -> dict[str, float]:
    """The nearest neighbor by cosine of the embedded model's image embeddings, without any training."""
    captioner = Captioner.from_pretrained(EMBEDDED, dtype="float32")

    def embeddings(folder: Path) -> torch.Tensor:
        tiles = [captioner.prepare(str(path))[1][0] for path, _ in read_study_set(folder)]
        with torch.no_grad():
            encoded = torch.cat([captioner.model.encode_images(tile).flatten(1) for tile in tiles])
        return torch.nn.functional.normalize(encoded - encoded.mean(), dim=-1)

    known = [caption for _, caption in read_study_set(train)]
    nearest = (embeddings(test) @ embeddings(train).T).argmax(1).tolist()
    right = [known[i] == caption for i, (_, caption) in zip(nearest, read_study_set(test))]
    return {"exact": sum(right) / len(right)}
