"""Progress lines by the clock, metrics.jsonl, and trackers."""

import json
import os
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanovlm.errors import MissingExtraError, TrainingError
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.metrics import MetricsLogger, StepMetrics, check_installed, read_metrics, truncate
from support.logs import log_lines
from support.training import CFG, answer_questions


def test_pace_and_time_left_are_measured_by_the_clock(tmp_path):
    """Steps of two seconds, but the first of nine; evaluations of 30 seconds, of which two are left."""
    now = [0.0]
    context = DistributedContext(torch.device("cpu"))
    cfg = replace(CFG, max_steps=105, log_every=6, save_every=50)
    logger = MetricsLogger(tmp_path, cfg, first_step=0, context=context, clock=lambda: now[0])
    now[0] += 30
    with log_lines() as lines:
        logger.log_evaluation(0, 1.5, None)
        for step in range(1, 7):
            now[0] += 9 if step == 1 else 2
            logger.log_step(StepMetrics(step, loss=2.0, lr=0.1, grad_norm=1.0, tokens=100))
    evaluation, needs, progress = lines
    assert evaluation == "step 0/105: held out: loss 1.5000"
    assert re.fullmatch(r"after 5 steps: peak memory [\d,]+ MiB, 2\.00 s/step, about 4 min left; Ctrl-C ends .*", needs)
    assert re.fullmatch(r"step 6/105: loss 2.0000, lr 1.0e-01, 32 tokens/s, [\d,]+ MiB, 2.00 s/step, .* left", progress)
    assert [entry.get("tokens_per_s") for entry in read_metrics(tmp_path / "metrics.jsonl")][:3] == [None, 11.1, 50.0]


def test_a_resumed_run_writes_the_metrics_of_an_uninterrupted_one(learn, make_batch, held_out, tmp_path):
    def failing(i):
        if i == 5:
            raise MemoryError
        return make_batch(i)

    def metrics(folder):
        entries = read_metrics(folder / "metrics.jsonl")
        return [{k: v for k, v in entry.items() if k not in ("tokens_per_s", "memory")} for entry in entries]

    options = held_out | {"answer_questions": answer_questions}
    learn(tmp_path / "whole", **options)
    with pytest.raises(MemoryError):
        learn(tmp_path / "run", batch=failing, **options)
    learn(tmp_path / "run", **options)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_an_unfinished_line_is_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2, 3]
    truncate(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    truncate(tmp_path / "new", 2)
    assert (tmp_path / "new").read_text() == "", "so that a folder without write permission is noticed at the start"
    path.write_text("{\n{}\n")
    with pytest.raises(TrainingError, match=r"metrics.jsonl cannot be read: .*; move it away"):
        read_metrics(path)


def test_an_overflow_is_null_because_json_has_no_infinity(learn, tmp_path):
    learn(tmp_path, replace(CFG, dtype="float16", max_steps=1))
    (entry,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert entry["grad_norm"] is None and entry["loss"] > 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_metrics_that_cannot_be_written_stop_the_run_with_one_line(learn, make_batch, tmp_path):
    def fill_disk(i):
        if i == 4:
            (tmp_path / "metrics.jsonl").unlink()
            (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        return make_batch(i)

    remedy = "No space left on device; free some disk space and .* from .*step-3"
    with pytest.raises(TrainingError, match=remedy) as caught:
        learn(tmp_path, batch=fill_disk)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_same_numbers_offline(learn, held_out, tmp_path, monkeypatch, name):
    """A stand-in for the library, with the part of its interface that both share."""
    runs, logged, finished = [], [], []
    stand_in = SimpleNamespace(
        init=lambda **options: runs.append(options),
        log=lambda values, step: logged.append((step, values)),
        finish=lambda: finished.append(True),
    )
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for steps in (6, 7):
        learn(tmp_path / "run", replace(CFG, report_to=name, max_steps=steps), **held_out)
    options, resumed = runs
    assert (options["resume"], resumed["resume"]) == ("never", "allow") and finished == 2 * [True]
    assert (options["project"], options["name"], options["config"]["lr"]) == ("nanovlm", "run", CFG.lr)
    assert options.get("mode") == ("offline" if name == "wandb" else None)
    assert [{"step": step} | values for step, values in logged] == read_metrics(tmp_path / "run/metrics.jsonl")


def test_a_missing_tracker_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"nanovlm\[track\]"):
        check_installed(replace(CFG, report_to="wandb"))
