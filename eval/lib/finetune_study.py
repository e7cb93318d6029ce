"""Default settings of `train.py` beside other settings and simple classifiers, on the data sets of `study_sets`."""

import tempfile
import time
from collections.abc import Iterable
from operator import eq
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch

from eval.lib.command import progress
from eval.lib.scene_splits import png
from eval.lib.study_sets import read_study_set, write_study_set
from eval.lib.training_race import MakeRun, TrainingSetup, race
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.cli.main import run_verb
from nanovlm.errors import TrainingError
from nanovlm.processing.image_loading import load_image
from nanovlm.synthetic import caption, random_scene
from nanovlm.training.config import FINETUNING

BATCH_SIZE = 64
FRESH_SCENES = 200
PIXELS = 32  # side of the images that the classifiers of pixels see
WAYS: dict[str, list[str]] = {
    "default": [],
    "adamw": ["--optimizer", "adamw", "--lr", "8e-4"],
    "muon, half the rate": ["--optimizer", "muon", "--lr", "2.5e-4"],
    "muon, twice the rate": ["--optimizer", "muon", "--lr", "1e-3"],
    "adapters": ["--lora-rank", "16"],
    "scenes mixed in": ["--data", "scenes@0.22", "--pack", "256"],  # packed, since their captions are longer
}


def study(
    sets: Iterable[str], archives: Path | None, ways: Iterable[str], flags: list[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """For each data set and way: the shares of exact answers and of answers that occur in training, and seconds.

    Where scenes are mixed in, also the share of exact captions of fresh scenes.
    """
    results: dict[str, dict] = {}
    for name in sets:
        with tempfile.TemporaryDirectory() as folder:
            train, test = write_study_set(name, archives, Path(folder) / "data")
            found = results[name] = {}
            for way in ways:
                out, started = Path(folder, way.replace(" ", "-")), time.perf_counter()
                argv = ["--data", str(train), "--out", str(out), *WAYS[way], *flags]
                progress(f"{name}, {way}: train.py {' '.join(argv)}")
                if code := run_verb("train", argv):
                    raise TrainingError(f"{name}, {way}: train.py ended with exit code {code}")
                seconds = time.perf_counter() - started
                found[way] = score(out, train, test) | {"seconds": round(seconds, 1)}
                if "scenes" in way:
                    found[way]["scenes"] = score_scenes(out)
            found |= {"SVM on pixels": classify_pixels(train, test), "neighbors": classify_embeddings(train, test)}
    return results


def cell(found: dict[str, dict[str, float]], name: str) -> str:
    """What the table says of a way, or nothing if there is no such result."""
    scores = {key: f"{found[name][key]:.1%}" for key in ("exact", "scenes") if key in found.get(name, {})}
    return " and ".join(scores.values()) + " of scenes" * ("scenes" in scores)


def race_study(
    sets: Iterable[str], archives: Path | None, loops: dict[str, MakeRun], seconds: float, settings: dict[str, Any]
) -> dict[str, dict[str, dict[str, float]]]:
    """The same shares for each data set and training loop, of the embedded model after `seconds` of training."""
    results: dict[str, dict] = {}
    for name in sets:
        with tempfile.TemporaryDirectory() as folder:
            train, test = write_study_set(name, archives, Path(folder) / "data")
            setup = TrainingSetup(EMBEDDED, train, augment=FINETUNING.augment, **settings)
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
    (_, known), (paths, truths) = read_study_set(train), read_study_set(test)
    answers = list(captioner.captions(list(map(str, paths)), batch_size=BATCH_SIZE))
    return {"exact": fmean(map(eq, answers, truths)), "known": fmean(answer in known for answer in answers)}


def score_scenes(model: Path) -> float:
    """The share of exact captions of fresh drawn scenes, which the embedded model has learned."""
    captioner, rng = Captioner.from_pretrained(model, dtype="float32"), Random("fresh")
    scenes = [random_scene(rng) for _ in range(FRESH_SCENES)]
    answers = captioner.captions([png(scene, rng) for scene in scenes], batch_size=BATCH_SIZE)
    return fmean(map(eq, answers, map(caption, scenes)))


def classify_pixels(train: Path, test: Path) -> dict[str, float]:
    """scikit-learn's support vector machine on 32 x 32 RGB pixels."""
    from sklearn.svm import SVC

    def pixels(paths: list[Path]) -> list[list[float]]:
        images = (load_image(path).convert("RGB").resize((PIXELS, PIXELS)) for path in paths)
        return [[value / 255 for value in image.tobytes()] for image in images]

    (known_paths, known), (paths, truths) = read_study_set(train), read_study_set(test)
    return {"exact": float(SVC(C=10).fit(pixels(known_paths), known).score(pixels(paths), truths))}


def classify_embeddings(train: Path, test: Path) -> dict[str, float]:
    """The nearest neighbor by cosine of the embedded model's image embeddings, without any training."""
    captioner = Captioner.from_pretrained(EMBEDDED, dtype="float32")

    def embeddings(paths: list[Path]) -> torch.Tensor:
        tiles = [captioner.prepare(str(path))[1][0] for path in paths]
        with torch.no_grad():
            encoded = torch.cat([captioner.model.encode_images(tile).flatten(1) for tile in tiles])
        return torch.nn.functional.normalize(encoded - encoded.mean(), dim=-1)

    (known_paths, known), (paths, truths) = read_study_set(train), read_study_set(test)
    nearest = (embeddings(paths) @ embeddings(known_paths).T).argmax(1).tolist()
    return {"exact": fmean(known[i] == truth for i, truth in zip(nearest, truths))}
