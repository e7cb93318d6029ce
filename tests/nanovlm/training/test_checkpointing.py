"""Whatever interrupts a run, it is resumed to the same weights, bit for bit, as if it had not been interrupted."""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovlm.errors import CheckpointError, TrainingError, UsageError
from nanovlm.training import checkpointing
from nanovlm.training.checkpointing import write_model
from nanovlm.training.metrics import read_metrics
from support import ROOT
from support.training import CFG, before_batch

VARIANTS = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "adapters": {"lora_rank": 2, "gradient_accumulation_steps": 2, "freeze": ["vision"]},
    "adapters alone": {"lora_rank": 2, "train_embeddings": False},
    "frozen parts": {"freeze": ["vision", "language"], "gradient_checkpointing": True},
    "muon": {"optimizer": "muon", "gradient_accumulation_steps": 2},
    "float16": {"dtype": "float16", "max_steps": 12},
}
RARE = ("adapters alone", "frozen parts")  # resumed as others are
RUNS = [pytest.param(name, marks=pytest.mark.full if name in RARE else ()) for name in VARIANTS]
STEPS = replace(CFG, save_every=2, max_steps=4, keep_checkpoints=2, decay=0.0)


def fail():
    raise MemoryError


def metrics(folder):
    entries = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in entry.items() if k not in ("tokens_per_s", "memory")} for entry in entries]


@pytest.mark.parametrize("variant", RUNS)
def test_resumed_run_equals_uninterrupted_bit_for_bit(learn, make_batch, held_out, tmp_path, tensors, variant):
    cfg = replace(CFG, **VARIANTS[variant])
    learn(tmp_path / "whole", cfg, **held_out)
    torch.manual_seed(3)  # leaves torch's generator elsewhere
    failing = before_batch((cfg.max_steps - 2) * cfg.gradient_accumulation_steps, fail, make_batch)
    with pytest.raises(MemoryError):
        learn(tmp_path / "run", cfg, failing, **held_out)
    lines = learn(tmp_path / "run", cfg, seed=0 if cfg.lora_rank else 8, **held_out)  # the checkpoint's weights count
    assert lines[0] == f"resumed {tmp_path / 'run'} at step {3 if cfg.max_steps == 6 else 9}"
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    name = f"checkpoints/step-{cfg.max_steps}/trainer.json"
    state, expected = (json.loads((tmp_path / run / name).read_text()) for run in ("run", "whole"))
    assert state == expected and bool(state["scaler"]) == (variant == "float16")


CHANGED = [  # settings, data and model of the run that resumes, and its lines
    ({}, "b", "", "the run is finished: .* raise --max-steps.* another --out; the data has changed: .* nothing is"),
    ({"max_steps": 8}, "b", "", ", with max_steps=8 instead of 6; the data .* it is b instead of None; training goes"),
    ({"max_steps": 8, "lr": 1e-3}, None, "", ", with max_steps=8 instead of 6, lr=0.001 instead of 0.003; step 8/8"),
    ({"max_steps": 8}, None, "/m", ", with max_steps=8 instead of 6, model=/m instead of the embedded model; step 8/8"),
]


@pytest.mark.parametrize(("settings", "data", "model", "line"), CHANGED)
def test_a_resumed_run_reports_what_changed(learn, tmp_path, whole, tensors, settings, data, model, line):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    origin = {"model": model} if model else {}
    lines = learn(tmp_path, replace(CFG, **settings), data_fingerprint=data, origin=origin)
    assert re.match(f"resumed {tmp_path} at step 6.*{line}", "; ".join(lines)), lines
    assert (tensors(tmp_path) == tensors(whole)) == (not settings)


def test_the_newest_checkpoints_are_kept(learn, tmp_path):
    for keep, names in ((1, [6]), (2, [4, 6]), (9, [2, 4, 6])):
        (tmp_path / f"{keep}/checkpoints/step-by-step").mkdir(parents=True)
        learn(tmp_path / f"{keep}", replace(CFG, save_every=2, keep_checkpoints=keep))
        kept = sorted(os.listdir(tmp_path / f"{keep}/checkpoints"))
        assert kept == [*(f"step-{name}" for name in names), "step-by-step"]


@pytest.mark.slow
def test_a_run_killed_ten_times_at_any_moment_finishes_with_the_same_weights(tmp_path, tensors):
    """kill -9, often while a checkpoint is being written, since one is written after every step."""
    settings = {"max_steps": 150, "gradient_accumulation_steps": 2, "lora_rank": 2, "save_every": 1}
    program = str(Path(__file__).parent / "distributed_program.py")
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "WORLD_SIZE": "1", "RANK": "0"}
    groups = (json.dumps([[1, [[name, {"settings": settings}]]]]) for name in ("run", "whole"))
    run, whole = ([sys.executable, program, str(tmp_path), group] for group in groups)
    rng, step = random.Random(0), 0
    for _ in range(10):
        with subprocess.Popen(run, env=env) as process:
            while (now := max(checkpointing.checkpoint_steps(tmp_path / "run"), default=0)) < step + 3:
                assert process.poll() is None and not time.sleep(0.01)
            time.sleep(rng.random() / 10)
            process.kill()
        step = now
    for command in (run, whole):
        subprocess.run(command, check=True, env=env)
    resumed_at = int(re.match(r"resumed .* at step (\d+)\n", (tmp_path / "run.0.log").read_text())[1])
    assert 30 <= step <= resumed_at < 150
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")


@pytest.mark.parametrize(("failing", "last"), [(2, "step-3"), (3, "step-6")], ids=["checkpoint", "model"])
def test_a_full_disk_is_one_line_and_loses_nothing(learn, tmp_path, monkeypatch, whole, tensors, failing, last):
    calls = []

    def write_until_full(folder, *args, **options):
        calls.append(folder)
        if len(calls) == failing:
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write_model(folder, *args, **options)

    monkeypatch.setattr(checkpointing, "write_model", write_until_full)
    remedy = "No space left.*free some disk space and run the same command again to resume from"
    with pytest.raises(TrainingError, match=remedy) as caught:
        learn(tmp_path)
    assert str(caught.value).endswith(last) and os.listdir(tmp_path / "checkpoints") == [last]
    monkeypatch.undo()
    learn(tmp_path)
    assert tensors(tmp_path) == tensors(whole)


def test_metrics_that_cannot_be_written_stop_the_run_with_one_line(learn, make_batch, tmp_path, monkeypatch):
    def write(descriptor, data):
        raise OSError(28, "No space left on device")

    fill_disk = lambda: monkeypatch.setattr(os, "write", write)  # noqa: E731
    with pytest.raises(TrainingError, match="No space left on device; free some disk space and .* from .*step-3$"):
        learn(tmp_path, batch=before_batch(4, fill_disk, make_batch))


@pytest.fixture(scope="module")
def two_checkpoints(learn, tmp_path_factory):
    learn(folder := tmp_path_factory.mktemp("two"), STEPS)
    return folder


def cut(name):
    return lambda folder: os.truncate(folder / name, 20)


def missing(name):
    return lambda folder: (folder / name).unlink()


def state_with(**changes):
    """Change keys of trainer.json; None removes one."""

    def change(folder):
        path = folder / "trainer.json"
        state = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))

    return change


def optimizer_with(change):

    def change_file(folder):
        tensors = load_file(folder / "optimizer.safetensors")
        change(tensors, min(name for name in tensors if name.endswith("/exp_avg_sq")))
        save_file(tensors, folder / "optimizer.safetensors")

    return change_file


def piped(name):
    return lambda folder: (missing(name)(folder), os.mkfifo(folder / name))


def moment(change):
    """Change the squares of a gradient in optimizer.safetensors."""
    return optimizer_with(lambda tensors, name: tensors.update({name: change(tensors[name])}))


FILES = ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json")
DAMAGES = {
    **{f"{name}, {change.__name__}": change(name) for name in FILES for change in (cut, missing)},
    **{
        f"{name}={value}": state_with(**{name: value})  # None: without it
        for name, values in {
            "config": (None, [], {}),
            "step": (-3, 3, "4", True),
            "scores": ([["a", "b"]], [[1, 2, 3]], 5),
            "metric": (5,),
            "streams": (None,),
            "scaler": ({"a": 1},),
        }.items()
        for value in values
    },
    "a tensor less": optimizer_with(lambda tensors, name: tensors.pop(name)),
    "a tensor more": optimizer_with(lambda tensors, name: tensors.update(more=torch.zeros(1))),
    "another shape": moment(lambda tensor: torch.zeros(7)),
    "another dtype": moment(torch.Tensor.half),
    "integers": moment(torch.Tensor.int),
    **{f"{value}": moment(lambda tensor, value=value: tensor.fill_(value)) for value in (math.nan, math.inf, -1.0)},
    **{f"a pipe as {name}": piped(name) for name in FILES[:3]},
}


DAMAGED = [pytest.param(name, marks=pytest.mark.full if "missing" in name else ()) for name in DAMAGES]


@pytest.mark.parametrize("name", DAMAGED)
def test_instead_of_a_damaged_checkpoint_the_older_one_is_taken(learn, tmp_path, two_checkpoints, tensors, name):
    shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    DAMAGES[name](tmp_path / "checkpoints/step-4")
    told, resumed, *_ = learn(tmp_path, STEPS)
    assert "step-4 is damaged: " in told and "\n" not in told and "download" not in told
    assert told.endswith(f"; resuming from {tmp_path / 'checkpoints/step-2'} instead")
    assert name.startswith(FILES) <= (name.partition(",")[0] in told) and "at step 2" in resumed
    assert tensors(tmp_path) == tensors(two_checkpoints)


def test_without_a_whole_checkpoint_there_is_nothing_to_resume(learn, tmp_path, two_checkpoints):
    shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    for step, name in ((2, "trainer.json"), (4, "model.safetensors")):
        cut(name)(tmp_path / f"checkpoints/step-{step}")
    words = "step-4 is damaged: .*model.safetensors.*; move it away to start over$"
    with pytest.raises(CheckpointError, match=words):
        learn(tmp_path, STEPS)


OTHERS = [  # settings of a run, those of the one that resumes it, and words of the error
    ({}, {"freeze": ["vision"]}, r"freeze=\[\], but this run has "),
    ({}, {"lora_rank": 2}, "lora_rank=0, but this run has "),
    ({}, {"optimizer": "muon"}, "optimizer=adamw, but this run has "),
    ({"lora_rank": 2, "freeze": ["vision"]}, {"freeze": []}, r"freeze=\['vision'\], but "),
    ({"lora_rank": 2}, {"lora_rank": 3}, "lora_rank=2, but this run has "),
    ({"lora_rank": 2}, {"lora_alpha": 4.0}, "lora_alpha=16.0, but this run has lora_alpha=4.0; resume with the"),
    ({"lora_rank": 2}, {"train_embeddings": False}, "train_embeddings=True, but this run has "),
    ({}, {"lm_n_blocks": 3}, "lm_n_blocks=2, but this run has lm_n_blocks=3; resume with the same, or train in"),
    ({}, {"lm_inter_dim": 40}, "lm_inter_dim=32, but "),
    ({}, {"lm_re_base": 50.0}, "lm_re_base=100.0, but this run has lm_re_base=50.0; resume with"),
]


@pytest.mark.parametrize(("before", "now", "words"), OTHERS)
def test_a_run_is_not_resumed_with_others(tiny_model, learn, tmp_path, two_checkpoints, tensors, before, now, words):
    cfg = replace(STEPS, max_steps=2, **before)
    learn(tmp_path, cfg) if before else shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    held = tensors(tmp_path)
    sizes = {name: value for name, value in now.items() if name.startswith("lm_")}
    model = tiny_model(0, lm_dropout=0.1, vit_dropout=0.1, **sizes)
    with pytest.raises(UsageError, match=rf"step-\d was trained with {words}"):
        learn(tmp_path, cfg if sizes else replace(cfg, **now), model=model)
    assert tensors(tmp_path) == held, "left alone"


def test_a_part_without_gradients_yet_is_resumed(learn, make_batch, tmp_path):
    learn(tmp_path, replace(CFG, max_steps=3), lambda i: make_batch(i, images=False))
    assert learn(tmp_path, CFG)[0].startswith("resumed")
