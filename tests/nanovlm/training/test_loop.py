"""The loop as one run shows it: what it writes, which model it keeps, and how signals and faults end it."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from nanovlm.embedded import SETTINGS
from nanovlm.errors import DataError, TrainingError, UsageError
from nanovlm.synthetic.recipe import SceneBatches
from nanovlm.training.loader import TrainingInterrupted
from support import ROOT, another_run
from support.training import CFG, answer_questions, train


def digest(folder, name="model.safetensors"):
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


def steps_kept(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*"))


def before_batch(number, action, batch):
    """batch, which calls the action before it returns the batch of this number."""

    def get_batch(i):
        if i == number:
            action()
        return batch(i)

    return get_batch


def test_every_step_is_a_line_of_numbers(run):
    assert [entry["step"] for entry in run.steps] == list(range(1, 21))
    assert all(e.keys() == {"step", "loss", "lr", "grad_norm", "tokens_per_s", "memory"} for e in run.steps)
    assert [entry["lr"] for entry in run.steps] == [run.cfg.lr_at(step) for step in range(20)]
    assert all(entry["tokens_per_s"] > 0 and 2**20 < entry["memory"] < 2**40 for entry in run.steps)


def test_it_learns_and_prints_progress(run):
    assert run.steps[-1]["loss"] < run.steps[0]["loss"] / 4
    mean = (run.steps[2]["loss"] + run.steps[3]["loss"]) / 2
    pattern = rf"step 4/20: loss {mean:.4f}, lr 1.0e-02, [\d,]+ tokens/s, [\d,]+ MiB, .* s/step, about 0 min left"
    assert any(re.fullmatch(pattern, line) for line in run.lines)


def test_the_final_model_is_the_one_with_the_lowest_held_out_loss(run):
    best = min((step for step in run.losses if step), key=lambda step: (run.losses[step], -step))
    assert list(run.losses) == list(range(0, 21, 2)) and best < 20, "the model has to overfit"
    assert steps_kept(run.folder) == [best, 20]
    assert digest(run.folder) == digest(run.folder / f"checkpoints/step-{best}")
    words = f"{run.folder} holds the model of step {best}, the best by held-out loss {run.losses[best]:.4f}"
    assert words in run.lines


def test_held_out_answers_are_shown_and_written(run):
    answers = [entry["answers"] for entry in run.entries if "answers" in entry]
    assert len(answers) == 11 and answers[0][1] == "gray"
    assert any("held out: loss" in line and "exact match 0.5000" in line for line in run.lines)
    assert "  answer: gray  (reference: gray)" in run.lines
    assert "final model's answers to 4 held-out questions: exact match 0.5000 (95% interval 0.150 to 0.850)" in str(
        run.lines
    )


def test_the_model_keeps_its_prompt_and_the_state_of_the_trainer_is_one_file(run):
    assert json.loads((run.folder / SETTINGS).read_text()) == {"prompt": "Which color?"}
    state = json.loads((run.folder / "checkpoints/step-20/trainer.json").read_text())
    assert state["step"] == 20 and dict(state["scores"]) == pytest.approx(run.losses)
    kinds = {path.suffix for path in run.folder.rglob("*.*") if path.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors", ".html"}, "nothing that could run"


def test_the_validation_loss_is_the_mean_over_all_held_out_answers(run, tiny_model, held_out):
    model, losses = tiny_model(0, lm_dropout=0.0, vit_dropout=0.0), []
    with torch.no_grad():
        for held in (held_out["validation"](i) for i in range(3)):
            log_probs = model(**held)[0].log_softmax(-1)
            positions = (held["targets"] != -100).nonzero().tolist()
            losses += [-log_probs[b, t, held["targets"][b, t]].item() for b, t in positions]
    assert run.losses[0] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_evaluation_changes_no_weights(learn, held_out, tmp_path):
    learn(tmp_path / "without")
    learn(tmp_path / "with", answer_questions=answer_questions, **held_out)
    name = "checkpoints/step-6/model.safetensors"
    assert digest(tmp_path / "without", name) == digest(tmp_path / "with", name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_its_best_model_and_it_goes_on(learn, make_batch, held_out, tmp_path, number):
    """The resumed run ends with the bytes of an uninterrupted one."""
    cfg, handlers = replace(CFG, max_steps=8, save_every=2), signal.getsignal(number)
    learn(tmp_path / "whole", cfg, **held_out)
    stop = before_batch(4, lambda: os.kill(os.getpid(), number), make_batch)
    with pytest.raises(TrainingInterrupted) as end:
        learn(tmp_path / "run", cfg, stop, **held_out)
    assert end.value.code == 128 + number and signal.getsignal(number) == handlers
    assert max(steps_kept(tmp_path / "run")) == 5
    state = json.loads((tmp_path / "run/checkpoints/step-5/trainer.json").read_text())
    best = min((step for step, _ in state["scores"] if step), key=dict(state["scores"]).get)
    assert digest(tmp_path / "run") == digest(tmp_path / f"run/checkpoints/step-{best}"), "the best so far"
    assert learn(tmp_path / "run", cfg, **held_out)[0].endswith("at step 5")
    for name in ("model.safetensors", "checkpoints/step-8/optimizer.safetensors", "checkpoints/step-8/trainer.json"):
        assert digest(tmp_path / "run", name) == digest(tmp_path / "whole", name)


def test_a_signal_without_held_out_examples_writes_the_model_of_that_step(learn, make_batch, tmp_path):
    with pytest.raises(TrainingInterrupted):
        learn(tmp_path, batch=before_batch(1, lambda: os.kill(os.getpid(), signal.SIGINT), make_batch))
    assert steps_kept(tmp_path) == [2] and digest(tmp_path) == digest(tmp_path / "checkpoints/step-2")
    learn(tmp_path, batch=before_batch(5, lambda: os.kill(os.getpid(), signal.SIGTERM), make_batch))
    assert digest(tmp_path) == digest(tmp_path / "checkpoints/step-6"), "the last step lets the run finish"


def test_a_second_signal_stops_at_once(learn, make_batch, tmp_path):
    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # the first is handled before the second arrives, whichever thread receives it

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            learn(tmp_path, batch=before_batch(1, twice, make_batch))
    finally:
        signal.signal(signal.SIGINT, usual)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.full
def test_the_program_ends_with_two_lines_and_the_code_of_the_signal(tmp_path):
    """As Ctrl-C in a terminal does, the signal goes to all processes, also to the worker that prepares batches."""
    command = [sys.executable, str(ROOT / "train.py"), "--recipe", "scenes", "--batch-size", "1", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as program:
        for line in program.stderr:
            if line.startswith("after 5"):
                break
        os.killpg(program.pid, signal.SIGINT)
        rest = program.stderr.read().splitlines()
    (step,) = steps_kept(tmp_path / "out")
    assert program.returncode == 130
    assert rest == [
        f"SIGINT: stopped at step {step}; run the same command again to go on from there",
        f"out holds the model of step {step}",
    ]


def test_training_works_in_a_thread(learn, tmp_path):
    """Where Python allows no signal handlers."""
    thread = threading.Thread(target=learn, args=[tmp_path])
    thread.start()
    thread.join()
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_keeps_its_class_and_message(learn, make_batch, tmp_path, num_workers):
    """A DataLoader's worker would put a traceback into the message."""

    def refuse():
        raise DataError("cat.png is damaged")

    with pytest.raises(DataError, match=r"^cat.png is damaged$"):
        learn(tmp_path, replace(CFG, num_workers=num_workers), before_batch(1, refuse, make_batch))


def poisoned(number, batch):
    """batch, with images that are not a number in the batch of this number."""
    return lambda i: batch(i) | {"images": batch(i)["images"] * (float("nan") if i == number else 1)}


def test_a_diverged_run_names_the_checkpoints_to_go_back_to(learn, make_batch, tmp_path):
    with pytest.raises(TrainingError, match="step 0 has loss nan.*lr is not the reason.*--check-data"):
        learn(tmp_path, batch=poisoned(0, make_batch))
    cfg, folder = replace(CFG, save_every=2, keep_checkpoints=2), tmp_path / "checkpoints"
    with pytest.raises(TrainingError, match="step 5 has loss nan.* lower lr=0.003 and run again to resume") as caught:
        learn(tmp_path, cfg, poisoned(5, make_batch))
    older = f"or move it away first to resume from {folder / 'step-2'}"
    assert str(caught.value).endswith(f"resume from {folder / 'step-4'}, {older}")
    (folder / "step-4").rename(tmp_path / "away")
    assert learn(tmp_path, cfg)[0].endswith("at step 2")


def test_two_runs_at_once_are_refused(learn, tmp_path):
    with another_run(tmp_path), pytest.raises(UsageError, match="another run writes there; wait for its end"):
        learn(tmp_path)
    learn(tmp_path)
    assert not (tmp_path / ".train.lock").exists()


def test_a_worker_changes_nothing(model_and_processor, tmp_path):
    model, processor = model_and_processor
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cfg = replace(CFG, max_steps=2, batch_size=1)
    for workers in (0, 1):
        get_batch = SceneBatches(processor, 1, 0)
        model.load_state_dict(state)
        train(
            model, processor.tokenizer.to_json(), get_batch, replace(cfg, num_workers=workers), tmp_path / f"{workers}"
        )
    model.load_state_dict(state)
    model.eval()
    alone, beside = (load_file(tmp_path / name / "model.safetensors") for name in "01")
    assert all(torch.equal(alone[name], beside[name]) for name in alone)
