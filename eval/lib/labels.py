"""Images in folders that name them: read, learned by train.py and by other classifiers, and right answers counted."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from PIL import Image

from eval.lib.command import progress
from nanovlm.captioner import Captioner
from nanovlm.cli.main import run_verb
from nanovlm.errors import InputError, TrainingError, needs_extra
from nanovlm.evaluation.metrics import intervals
from nanovlm.processing.image_loading import load_image

N_DIGITS = 600  # to learn from
SIDE = 64  # pixels of a digit, drawn as 8 x 8 squares
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PIXELS = 32  # side of the images that the support vector machine sees
BINS = 10  # of probabilities, for the calibration

Labeled = tuple[list[str], list[str]]  # paths of images, and their labels
Classify = Callable[[Labeled, Sequence[str]], list[str]]  # learned images, and paths of others, to labels of these


def read_labeled(folder: Path) -> Labeled:
    """Images in a folder for each label, in the order of their names."""
    paths = sorted(path for path in folder.glob("*/*") if path.is_file())
    labels = [path.parent.name for path in paths]
    if len(set(labels)) < 2:
        raise InputError(f"{folder} has no folders of images, one for each of several labels")
    return [str(path) for path in paths], labels


def write_digits(folder: Path) -> Path:
    """Write scikit-learn's digits to train and test in a folder, which is returned."""
    with needs_extra("eval", "the digits"):
        from sklearn.datasets import load_digits
    data = load_digits()
    examples = list(zip((data.images * 15).astype("uint8"), data.target))
    Random("digits 1").shuffle(examples)
    for i, (pixels, digit) in enumerate(examples):
        path = folder / ("train" if i < N_DIGITS else "test") / f"the digit {WORDS[digit]}" / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(path)
    return folder


def cpu_seconds() -> float:
    """Seconds of all cores since the start, of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def train(argv: Sequence[str]) -> float:
    """Train by `train.py`, or resume; returns the CPU seconds that it took. TrainingError if it fails."""
    started = cpu_seconds()
    progress(f"train.py {' '.join(argv)}")
    if code := run_verb("train", argv):
        raise TrainingError(f"train.py ended with exit code {code}")
    return cpu_seconds() - started


def share(answers: Sequence[str], truths: Sequence[str]) -> dict[str, Any]:
    """Count right answers; also their share with its 95% interval (Wilson 1927)."""
    right = sum(answer.strip() == truth for answer, truth in zip(answers, truths, strict=True))
    exact = right / len(truths)
    interval = intervals({"exact": exact}, len(truths))["exact"]
    return {"right": right, "of": len(truths), "exact": exact, "interval": interval}


def calibration(probabilities: Sequence[float], is_right: Sequence[bool]) -> dict[str, Any]:
    """Ten bins of probabilities and the share that was right; the expected calibration error (Naeini et al. 2015)."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for probability, right in zip(probabilities, is_right):
        bins.setdefault(min(int(probability * BINS), BINS - 1), []).append((probability, right))
    rows = []
    for i, inside in sorted(bins.items()):
        mean, part = map(fmean, zip(*inside))
        rows.append({"from": i / BINS, "n": len(inside), "probability": mean, "right": part})
    error = sum(row["n"] * abs(row["probability"] - row["right"]) for row in rows) / len(probabilities)
    return {"bins": rows, "error": error}


def classifiers(captioner: Captioner) -> dict[str, Classify]:
    """scikit-learn's logistic regression on the encoder's features, and support vector machine on 32 x 32 pixels."""
    with needs_extra("eval", "a classifier"):
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        from sklearn.svm import SVC

    @torch.inference_mode()
    def features(path: str) -> list[float]:
        """Mean and maximum over the encoder's patches (2 D) of the first tile."""
        (encoded,) = captioner.model.vision_encoder(captioner.prepare(path)[1][0][:1])
        return torch.cat([encoded.mean(0), encoded.amax(0)]).tolist()

    def pixels(path: str) -> list[float]:
        return [value / 255 for value in load_image(path).resize((PIXELS, PIXELS)).tobytes()]

    def classify(model: Any, read: Callable[[str], list[float]], learned: Labeled, paths: Sequence[str]) -> list[str]:
        model.fit([read(path) for path in learned[0]], learned[1])
        return model.predict([read(path) for path in paths]).tolist()

    regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000, C=0.01))
    return {
        "logistic regression on the encoder": partial(classify, regression, features),
        "SVM on pixels": partial(classify, SVC(C=10), pixels),
    }
