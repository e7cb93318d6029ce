"""Shared by the evaluations of trained classifiers: training by train.py, a classifier beside it, right answers."""

import os
from collections.abc import Sequence
from typing import Any

from eval.lib.command import progress
from nanovlm.cli.main import run_verb
from nanovlm.errors import TrainingError
from nanovlm.evaluation.metrics import intervals
from nanovlm.processing.image_loading import load_image

PIXELS = 32  # side of the images that the support vector machine sees

Labeled = tuple[list[str], list[str]]  # paths of images, and their labels


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


def classify_pixels(learned: Labeled, tested: Labeled) -> list[str]:
    """scikit-learn's support vector machine on 32 x 32 RGB pixels."""
    from sklearn.svm import SVC

    def pixels(paths: list[str]) -> list[list[float]]:
        images = (load_image(path).resize((PIXELS, PIXELS)) for path in paths)
        return [[value / 255 for value in image.tobytes()] for image in images]

    return SVC(C=10).fit(pixels(learned[0]), learned[1]).predict(pixels(tested[0])).tolist()
