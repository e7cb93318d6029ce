"""Tiny runs of training: one fixture trains, and one run of 20 steps is read by many tests."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from nanovlm.training.metrics import read_metrics
from support.logs import log_lines
from support.training import CFG, answer_questions, train


@pytest.fixture(scope="session")
def held_out(make_batch):
    """The fields of a TrainingTask that score a model on held-out examples."""
    batches = {"validation": lambda i: make_batch(100 + i, (4 + 9 * i, 6)), "n_validation": 3}
    return batches | {"answer_questions": answer_questions}


@pytest.fixture(scope="session")
def learn(tiny_model, make_batch):
    """Train a tiny model with dropout into a folder; returns the lines it logged."""

    def learn(folder, cfg=CFG, batch=make_batch, seed=0, dropout=0.1, model=None, **options):
        model = model or tiny_model(seed, lm_dropout=dropout, vit_dropout=dropout)
        with log_lines() as lines:
            train(model, "{}", batch, cfg, folder, **options)
        return lines

    return learn


@pytest.fixture(scope="session")
def run(learn, make_batch, held_out, tmp_path_factory):
    """A run of 20 steps that overfits to one batch: its folder, lines and metrics, by kind."""
    folder = tmp_path_factory.mktemp("run")
    cfg = replace(CFG, max_steps=20, save_every=2, lr=1e-2)
    lines = learn(folder, cfg, lambda i: make_batch(0), dropout=0.0, prompt="Which color?", **held_out)
    entries = read_metrics(folder / "metrics.jsonl")
    steps = [entry for entry in entries if "lr" in entry]
    losses = {entry["step"]: entry["validation_loss"] for entry in entries if "validation_loss" in entry}
    return SimpleNamespace(folder=folder, cfg=cfg, lines=lines, entries=entries, steps=steps, losses=losses)


@pytest.fixture(scope="session")
def whole(learn, tmp_path_factory):
    learn(folder := tmp_path_factory.mktemp("whole"))
    return folder


@pytest.fixture(scope="session")
def tensors():
    """Every tensor in a folder's files, bit for bit."""
    return lambda folder: {
        str(path.relative_to(folder)): {key: t.numpy().tobytes() for key, t in load_file(path).items()}
        for path in sorted(folder.rglob("*.safetensors"))
    }
