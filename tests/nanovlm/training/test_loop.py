"""The loop as one run shows it: what it writes, which model it keeps, and how signals and faults end it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from models.common import files
from nanovlm.data.examples import Question
from nanovlm.embedded import SETTINGS
from nanovlm.errors import BusyError, MissingExtraError, TrainingError
from nanovlm.evaluation.evaluate import Answer, Evaluation
from nanovlm.training.checkpointing import checkpoint_steps
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.loader import TrainingInterrupted, load_batches
from nanovlm.training.metrics import MetricsLogger, check_installed, read_metrics, truncate
from support import ROOT
from support.logs import log_lines
from support.training import CFG, before_batch


def same_model(folder, step):
    names = ("model.safetensors", f"checkpoints/step-{step}/model.safetensors")
    return (folder / names[0]).read_bytes() == (folder / names[1]).read_bytes()


def test_a_run_learns_every_step_is_a_line_and_the_model_is_that_of_the_lowest_held_out_loss(run):
    assert [entry["step"] for entry in run.steps] == list(range(1, 21))
    assert all(e.keys() == {"step", "loss", "lr", "grad_norm", "tokens_per_s", "memory"} for e in run.steps)
    assert [entry["lr"] for entry in run.steps] == [run.cfg.lr_at(step) for step in range(20)]
    assert all(2**20 < entry["memory"] < 2**40 for entry in run.steps)
    assert run.steps[-1]["loss"] < run.steps[0]["loss"] / 4
    best = min((step for step in run.losses if step), key=lambda step: (run.losses[step], -step))
    assert list(run.losses) == list(range(0, 21, 2)) and best < 20, "the model has to overfit"
    assert checkpoint_steps(run.folder) == sorted({best, 20}) and same_model(run.folder, best)
    words = f"{run.folder} holds the model of step {best}, the best by held-out loss {run.losses[best]:.4f}"
    assert words in run.lines


def test_held_out_answers_the_prompt_and_the_state_of_the_trainer_are_written(run):
    answers = [entry["answers"] for entry in run.entries if "answers" in entry]
    assert len(answers) == 11 and answers[0][1] == "gray"
    assert any("held out: loss" in line and "exact match 0.5000" in line for line in run.lines)
    assert "  answer: gray  (reference: gray)" in run.lines
    words = "final model's answers to 4 held-out questions: exact match 0.5000 (95% interval 0.150 to 0.850)"
    assert words in str(run.lines) and "Wrong: 2 of 4" in (run.folder / "report.html").read_text()
    assert json.loads((run.folder / SETTINGS).read_text()) == {"prompt": "Which color?"}
    state = json.loads((run.folder / "checkpoints/step-20/trainer.json").read_text())
    assert state["step"] == 20 and dict(state["scores"]) == pytest.approx(run.losses)
    assert (state["config"].pop("validation"), state["config"].pop("data")) == (0, None)
    assert replace(run.cfg, **state["config"]) == run.cfg
    kinds = {path.suffix for path in run.folder.rglob("*.*") if path.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors", ".html"}, "nothing that could run"


def test_the_validation_loss_is_the_mean_over_all_held_out_answers(run, tiny_model, held_out):
    model = tiny_model(0, lm_dropout=0.0, vit_dropout=0.0)
    losses = []
    for held in (held_out["validation"](i) for i in range(3)):
        log_probs = model(**held)[0].log_softmax(-1)
        positions = (held["targets"] != -100).nonzero().tolist()
        losses += [-log_probs[b, t, held["targets"][b, t]].item() for b, t in positions]
    assert run.losses[0] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_evaluation_and_workers_change_no_weights(learn, held_out, tmp_path, whole, tensors):
    learn(tmp_path, replace(CFG, num_workers=1), **held_out)
    name = "checkpoints/step-6/model.safetensors"
    assert tensors(tmp_path)[name] == tensors(whole)[name]


def test_of_scores_the_best_the_last_of_equals_and_none_of_another_metric_counts(learn, held_out, tmp_path):
    rates = iter([9.0, 0.25, 0.5, 0.25])  # before training, at each checkpoint, of the final model

    def answer(*_):
        return Evaluation([Answer(Question("d", "a", [], [], ["x"]), "y", {"cer": next(rates)})])

    task = held_out | {"answer_questions": answer, "metric": "cer", "is_error_rate": True}
    lines = learn(tmp_path / "rate", CFG, **task)
    assert f"{tmp_path / 'rate'} holds the model of step 3, the best by held-out cer 0.2500" in lines
    assert not any("has not become better" in line for line in lines)
    lines = learn(tmp_path, CFG, metric="exact_match", **held_out)
    assert f"{tmp_path} holds the model of step 6, the best by held-out exact match 0.5000" in lines
    lines = learn(tmp_path, replace(CFG, max_steps=8), **held_out)
    assert f"{tmp_path} holds the model of step 8, the best by held-out loss" in str(lines), "more than 0.5"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_its_best_model_and_it_goes_on(learn, make_batch, held_out, tmp_path, tensors, number):
    cfg, handlers = replace(CFG, max_steps=8, save_every=2), signal.getsignal(number)
    learn(tmp_path / "whole", cfg, **held_out)
    stop = before_batch(4, lambda: os.kill(os.getpid(), number), make_batch)
    with pytest.raises(TrainingInterrupted) as end, log_lines() as lines:
        learn(tmp_path / "run", cfg, stop, **held_out)
    assert end.value.code == 128 + number and signal.getsignal(number) == handlers
    assert max(checkpoint_steps(tmp_path / "run")) == 5
    state = json.loads((tmp_path / "run/checkpoints/step-5/trainer.json").read_text())
    best = min((step for step, _ in state["scores"] if step), key=dict(state["scores"]).get)
    assert same_model(tmp_path / "run", best), "the best so far"
    name = signal.Signals(number).name
    assert lines[-2] == f"{name}: stopped at step 5; run the same command again to go on from there"
    assert lines[-1].startswith(f"{tmp_path / 'run'} holds the model of step {best}, the best by")
    assert learn(tmp_path / "run", cfg, **held_out)[0].endswith("at step 5")
    for name in ("model.safetensors", "checkpoints/step-8/optimizer.safetensors"):
        assert tensors(tmp_path / "run")[name] == tensors(tmp_path / "whole")[name]


def test_a_signal_without_held_out_examples_writes_the_model_of_that_step(learn, make_batch, tmp_path):
    with pytest.raises(TrainingInterrupted):
        learn(tmp_path, batch=before_batch(1, lambda: os.kill(os.getpid(), signal.SIGINT), make_batch))
    assert checkpoint_steps(tmp_path) == [2] and same_model(tmp_path, 2)
    learn(tmp_path, batch=before_batch(5, lambda: os.kill(os.getpid(), signal.SIGTERM), make_batch))
    assert same_model(tmp_path, 6), "the last step lets the run finish"


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
def test_ctrl_c_in_a_terminal_reaches_the_worker_too_and_ends_with_two_lines(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), "--recipe", "scenes", "--batch-size", "1", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as program:
        for line in program.stderr:
            if line.startswith("after 5"):
                break
        os.killpg(program.pid, signal.SIGINT)
        lines = program.stderr.read().splitlines()
        rest = [line for line in lines if not line.startswith("note: ")]  # of a busy machine
    assert program.returncode == 130 and len(rest) == 2 and rest[0].startswith("SIGINT: stopped at step ")


def test_training_works_in_a_thread_where_python_allows_no_signal_handlers(learn, tmp_path):
    (thread := threading.Thread(target=learn, args=[tmp_path])).start()
    thread.join()
    assert (tmp_path / "model.safetensors").exists()


def batch_without_shared_memory(number):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # of the worker, as if it were full
    return {"images": torch.full((2, 3), float(number)), "targets": None}


def test_batches_arrive_where_shared_memory_is_full():
    pytest.importorskip("resource")
    with load_batches(batch_without_shared_memory, range(3), 1) as (batches, _):
        numbers = [batch["images"].mean().item() for batch in batches]
    assert numbers == [0, 1, 2]


@dataclass
class CountedStreams:
    """Batches of two streams, read in turns; each says how far it has come, and what it knows of the other."""

    states: dict

    def __call__(self, number):
        self.states[f"0:{number % 2}"] += 1
        return {"streams": dict(self.states)}


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_go_on_where_each_worker_stands(workers):
    """A worker's batch must not take the stream of another back to where the run was resumed."""
    with load_batches(CountedStreams({}), range(7), workers, {"0:0": 5, "0:1": 9}) as (batches, reached):
        assert list(batches) == [{}] * 7
    assert reached == {"0:0": 9, "0:1": 12}


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


def test_two_runs_at_once_are_refused_and_neither_loses_files(learn, tmp_path):
    (tmp_path / f"{files.PART}0").mkdir()
    with files.locked(tmp_path), pytest.raises(BusyError, match="another run writes there; wait for its end"):
        learn(tmp_path)
    assert list(tmp_path.glob(".*")), "the other run may be writing it"
    (tmp_path / "checkpoints" / f"{files.PART}1").mkdir(parents=True)
    (tmp_path / f"{files.PART}2").touch()
    theirs = [tmp_path / ".thesis.tmp", tmp_path / "checkpoints/.work.tmp"]
    for path in theirs:
        path.mkdir()
    learn(tmp_path)
    assert sorted(tmp_path.rglob(".*")) == theirs, "neither the lock nor what a killed save left behind"


def test_pace_and_time_left_are_measured_by_the_clock(tmp_path, monkeypatch):
    """Steps of two seconds, but the first of nine; evaluations of 30 seconds, of which two are left."""
    now = [0.0]
    context = DistributedContext(torch.device("cpu"))
    cfg = replace(CFG, max_steps=105, log_every=4, save_every=50)
    monkeypatch.setattr("nanovlm.training.metrics.time", SimpleNamespace(perf_counter=lambda: now[0]))
    logger = MetricsLogger(tmp_path, cfg, first_step=0, context=context)
    now[0] += 30
    with log_lines() as lines:
        logger.log_evaluation(0, 1.5, None)
        for step in (*range(1, 9), 105):
            now[0] += 9 if step == 1 else 2
            logger.log_step(step, loss=step / 2, lr=0.1, grad_norm=1.0, tokens=100)
    evaluation, first, needs, progress, last = lines
    assert evaluation == "step 0/105: held out: loss 1.5000"
    assert re.fullmatch(r"after 5 steps: peak memory [\d,]+ MiB, 2\.00 s/step, about 4 min left; Ctrl-C ends .*", needs)
    assert re.fullmatch(r"step 4/105: loss 1.2500, lr 1.0e-01, 27 tokens/s, [\d,]+ MiB, 2.00 s/step, .* left", first)
    assert progress.startswith("step 8/105: loss 3.2500, lr 1.0e-01, 50 tokens/s"), "since the last line"
    assert last.startswith("step 105/105: loss 52.5000") and last.endswith("about 0 min left")
    assert [entry.get("tokens_per_s") for entry in read_metrics(tmp_path / "metrics.jsonl")][:3] == [None, 11.1, 50.0]


def test_an_unfinished_line_is_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    path.write_text("{\n{}\n")
    with pytest.raises(TrainingError, match=r"metrics.jsonl cannot be read: .*; move it away"):
        read_metrics(path)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_same_numbers_offline(learn, held_out, tmp_path, monkeypatch, name):
    """A stand-in for the library, with the part of its interface that both share."""
    runs, logged, finished, log = [], [], [], lambda values, step: logged.append({"step": step} | values)
    parts = {"init": lambda **options: runs.append(options), "log": log, "finish": lambda: finished.append(True)}
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**parts))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (tmp_path / "run/wandb").mkdir(parents=True)
    for steps in (6, 7):
        learn(tmp_path / "run", replace(CFG, report_to=name, max_steps=steps), **held_out)
        for id in ("20260101_000001-abc", "20250101_000001-xyz"):
            (tmp_path / f"run/wandb/offline-run-{id}").mkdir(exist_ok=True)
    options, resumed = runs
    assert (options["resume"], resumed["resume"]) == ("never", "allow") and finished == 2 * [True]
    assert (options["project"], options["name"], options["config"]["lr"]) == ("nanovlm", "run", CFG.lr)
    assert (options.get("mode"), resumed.get("id")) == (("offline", "abc") if name == "wandb" else (None, None))
    assert logged == [entry for entry in read_metrics(tmp_path / "run/metrics.jsonl") if "answers" not in entry]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"nanovlm\[track\]"):
        check_installed(replace(CFG, report_to=name))
