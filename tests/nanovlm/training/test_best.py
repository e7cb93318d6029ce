"""The best model is kept and written at the end; a run that no longer improves stops."""

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


def stepwise(model_scores, metric="exact_match"):
    """A task's answer_questions that gives these scores one after another, and the last one of all questions."""
    scores = iter(model_scores)
    question = Question("held out", "0.png", [], "What?", ["that"])

    def answer(model, everything):
        return Evaluation([Answer(question, "this", {metric: 0.5 if everything else next(scores)})])

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

    cfg = replace(CFG, metric_for_best_model="exact_match")
    learn(tmp_path / "whole", cfg, answer_questions=stepwise(SCORES))
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "run", cfg, fail, answer_questions=stepwise(SCORES))
    resumed_at = max(steps_kept(tmp_path / "run"))
    learn(tmp_path / "run", cfg, answer_questions=stepwise(SCORES[resumed_at + 1 :]))
    names = ("model.safetensors", "checkpoints/step-2/model.safetensors", "checkpoints/step-8/optimizer.safetensors")
    for name in names:
        assert digest(tmp_path / "run", name) == digest(tmp_path / "whole", name)
    assert steps_kept(tmp_path / "run") == [2, 8]


def test_a_run_out_of_patience_stops_and_stays_stopped(learn, tmp_path):
    cfg = replace(CFG, metric_for_best_model="exact_match", patience=3)
    lines = learn(tmp_path, cfg, answer_questions=stepwise(SCORES))
    assert "; stopped after 3 evaluations without a better one" in lines[-2]
    assert steps_kept(tmp_path) == [2, 5] and digest(tmp_path) == digest(tmp_path / "checkpoints/step-2")
    before = digest(tmp_path)
    lines = learn(tmp_path, cfg, answer_questions=stepwise([]))
    assert lines[0].startswith(f"resumed {tmp_path} at step 5; the run is finished: ")
    assert "stopped after 3" in lines[1] and len(lines) == 3
    assert digest(tmp_path) == before and steps_kept(tmp_path) == [2, 5]
    learn(tmp_path, replace(cfg, patience=0), answer_questions=stepwise(SCORES[6:]))
    assert steps_kept(tmp_path) == [2, 8] and digest(tmp_path) == before


def test_an_evaluation_that_is_not_a_number_is_never_the_best(tmp_path):
    tracker = BestTracker(tmp_path, CFG, 0, has_answers=False)
    values = {0: 1.0, 1: None, 2: 3.0, 3: float("nan"), 4: 2.0}
    assert [step for step, value in values.items() if tracker.add(step, value)] == [2, 4]
    assert tracker.step == 4 and not tracker.improved


def test_the_best_of_the_checkpoints_that_are_left_counts(tmp_path):
    lines = [{"step": step, "validation_loss": loss} for step, loss in [(0, 9), (2, 1), (4, 2), (6, 3)]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path(tmp_path, "checkpoints/step-4").mkdir(parents=True)
    assert BestTracker(tmp_path, CFG, 6, has_answers=False).step == 4
    assert BestTracker(tmp_path, replace(CFG, keep_best=False), 6, has_answers=False).step == 2
    assert BestTracker(tmp_path, CFG, 3, has_answers=False).step is None


def test_the_interval_is_a_tenth_of_the_run_by_default():
    assert [TrainConfig(max_steps=n, validate_every=0).evaluation_interval for n in (3, 10, 850)] == [1, 1, 85]


def test_by_default_the_last_evaluation_within_a_standard_error_is_the_best(learn, tmp_path):
    auto = replace(CFG, metric_for_best_model="auto")
    of_25, of_15 = (replace(auto, validation_questions=n) for n in (25, 15))  # 25 have errors of 0.1, 0.06 and 0.04
    tracker = BestTracker(tmp_path, of_25, 0, has_answers=True)
    values = {0: 0.0, 1: 0.5, 2: 0.9, 3: 0.6, 4: 0.85, 5: 0.83, 6: float("nan"), 7: 0.95, 8: 0.9}
    assert [step for step, value in values.items() if tracker.add(step, value)] == [1, 2, 4, 7]
    assert "f1, 0.9500, within a standard error of the best" in tracker.description(False)
    few = BestTracker(tmp_path, of_15, 0, has_answers=True)
    assert [step for step, right in enumerate([0, 14, 15, 13, 14]) if few.add(step, right / 15)] == [1, 2, 4]
    assert BestTracker(tmp_path, auto, 0, has_answers=False).name == "loss"
    scores = [0.0, 0.2, 0.9, 0.5, 0.9, 0.8, 0.9, 0.3, 0.88]  # of 32 questions: an error of 0.05
    lines = learn(tmp_path / "run", auto, answer_questions=stepwise(scores, "f1"))
    assert steps_kept(tmp_path / "run") == [8]
    assert "the final model is that of step 8, the last with a validation f1, 0.8800" in lines[-2]
