"""The best model is kept and written at the end."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from nanovlm.evaluation import Evaluation
from nanovlm.evaluation.evaluate import Answer, Question
from nanovlm.training.config import TrainConfig
from nanovlm.training.metrics import BestTracker, read_metrics
from support.logs import log_lines
from support.training import train

CFG = TrainConfig(
    max_steps=8, lr=1e-2, warmup_steps=0, save_every=4, log_every=8, validate_every=1, validation_batches=2,
    num_workers=0, dtype="float32", keep_checkpoints=1,
)  # fmt: skip
SCORES = [0.1, 0.2, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]  # at the evaluations; the first is before the training


def digest(folder, name="model.safetensors"):
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


def steps_kept(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*"))


@pytest.fixture
def learn(tiny_model, make_batch):
    """Overfit a tiny model to a single batch, with other batches held out; the lines it logged."""

    def learn(folder, cfg=CFG, batch=lambda i: make_batch(0), **options):
        with log_lines() as lines:
            train(tiny_model(), "{}", batch, cfg, folder, validation=lambda i: make_batch(100 + i), **options)
        return lines

    return learn


def stepwise(model_scores):
    """A task's answer_questions that gives these scores one after another, and the last one of all questions."""
    scores = iter(model_scores)
    question = Question("held out", "0.png", [], "What?", ["that"])

    def answer(model, everything):
        return Evaluation([Answer(question, "this", {"exact_match": 0.5 if everything else next(scores)})])

    return answer


@pytest.mark.parametrize("rank", [0, 2])
def test_the_final_model_is_the_one_with_the_lowest_validation_loss(learn, tmp_path, rank):
    lines = learn(tmp_path, replace(CFG, lora_rank=rank))
    entries = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if "validation_loss" in entry]
    losses = {entry["step"]: entry["validation_loss"] for entry in entries}
    best = min((step for step in losses if step), key=losses.get)
    assert len(losses) == 9 and best < 8, "the model has to overfit"
    assert steps_kept(tmp_path) == [best, 8]
    for name in ("model.safetensors", *(["adapter_model.safetensors"] if rank else [])):
        assert digest(tmp_path, name) == digest(tmp_path / f"checkpoints/step-{best}", name)
    expected = f"the final model is that of step {best}, with the best validation loss, {losses[best]:.4f}"
    assert expected in lines
    assert any(line.startswith("before training it was") for line in lines) == (losses[best] >= losses[0])


def test_the_last_model_takes_the_place_of_a_best_one_that_is_damaged(learn, tmp_path):
    learn(tmp_path, CFG)
    best = min(steps_kept(tmp_path))
    (tmp_path / f"checkpoints/step-{best}/model.safetensors").write_bytes(b"torn")
    lines = learn(tmp_path, replace(CFG, max_steps=9))
    assert any(f"step-{best} is damaged" in line and "that of step 9 instead of the best" in line for line in lines)
    assert digest(tmp_path) == digest(tmp_path / "checkpoints/step-9")


def test_without_keep_best_the_final_model_is_the_last(learn, tmp_path):
    learn(tmp_path, replace(CFG, keep_best=False))
    assert steps_kept(tmp_path) == [8]
    assert digest(tmp_path) == digest(tmp_path / "checkpoints/step-8")


@pytest.mark.parametrize(
    "failing", [pytest.param(2, marks=pytest.mark.full), 3, pytest.param(5, marks=pytest.mark.full)]
)
def test_an_interrupted_run_ends_with_the_same_best_model(learn, make_batch, tmp_path, failing):
    def fail(i):
        if i == failing:
            raise KeyboardInterrupt
        return make_batch(0)

    best_by = {"best_metric": "exact_match"}
    learn(tmp_path / "whole", answer_questions=stepwise(SCORES), **best_by)
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "run", batch=fail, answer_questions=stepwise(SCORES), **best_by)
    resumed_at = max(steps_kept(tmp_path / "run"))
    learn(tmp_path / "run", answer_questions=stepwise(SCORES[resumed_at + 1 :]), **best_by)
    names = ("model.safetensors", "checkpoints/step-3/model.safetensors", "checkpoints/step-8/optimizer.safetensors")
    for name in names:
        assert digest(tmp_path / "run", name) == digest(tmp_path / "whole", name)
    assert steps_kept(tmp_path / "run") == [3, 8], "of equal ones the last"


def test_an_evaluation_that_is_not_a_number_is_never_the_best(tmp_path):
    tracker = BestTracker(tmp_path, CFG, "loss", 0)
    values = {0: 1.0, 1: None, 2: 3.0, 3: float("nan"), 4: 2.0}
    assert [step for step, value in values.items() if tracker.add(step, value)] == [2, 4]
    assert tracker.step == 4 and not tracker.improved


def test_the_best_of_the_checkpoints_that_are_left_counts(tmp_path):
    lines = [{"step": step, "validation_loss": loss} for step, loss in [(0, 9), (2, 1), (4, 2), (6, 3)]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path(tmp_path, "checkpoints/step-4").mkdir(parents=True)
    assert BestTracker(tmp_path, CFG, "loss", 6).step == 4
    assert BestTracker(tmp_path, replace(CFG, keep_best=False), "loss", 6).step == 2
    assert BestTracker(tmp_path, CFG, "loss", 3).step is None


def test_the_interval_is_a_tenth_of_the_run_by_default():
    assert [TrainConfig(max_steps=n, validate_every=0).evaluation_interval for n in (3, 10, 850)] == [1, 1, 85]
