"""Tiny runs of training: one fixture trains, and one run of 20 steps is read by many tests."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nanovlm.training.metrics import read_metrics
from support.logs import log_lines
from support.training import CFG, answer_questions, train


@pytest.fixture(scope="session")
def held_out(make_batch):
    return {"validation": lambda i: make_batch(100 + i, (4 + 9 * i, 6)), "n_validation": 3}


@pytest.fixture(scope="session")
def learn(tiny_model, make_batch):
    """Train a tiny model with dropout into a folder; returns the lines it logged."""

    def learn(folder, cfg=CFG, batch=make_batch, seed=0, dropout=0.1, **options):
        with log_lines() as lines:
            train(tiny_model(seed, lm_dropout=dropout, vit_dropout=dropout), "{}", batch, cfg, folder, **options)
        return lines

    return learn


@pytest.fixture(scope="session")
def run(learn, make_batch, held_out, tmp_path_factory):
    """A run of 20 steps that overfits to one batch: its folder, lines and metrics, by kind."""
    folder, cfg = tmp_path_factory.mktemp("run"), replace(CFG, max_steps=20, save_every=2, lr=1e-2)
    lines = learn(
        folder,
        cfg,
        lambda i: make_batch(0),
        dropout=0.0,
        answer_questions=answer_questions,
        prompt="Which color?",
        **held_out,
    )
    entries = read_metrics(folder / "metrics.jsonl")
    steps = [entry for entry in entries if "lr" in entry]
    losses = {entry["step"]: entry["validation_loss"] for entry in entries if "validation_loss" in entry}
    return SimpleNamespace(folder=folder, cfg=cfg, lines=lines, entries=entries, steps=steps, losses=losses)
