"""Whatever interrupts a run, it is resumed to the same weights, bit for bit, as if it had not been interrupted."""

import json
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

from nanovlm.errors import CheckpointError, TrainingError
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
STEPS = replace(CFG, save_every=2, max_steps=4, keep_checkpoints=2, decay=0.0)


def fail():
    raise MemoryError


def metrics(folder):
    entries = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in entry.items() if k not in ("tokens_per_s", "memory")} for entry in entries]


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.full if name in RARE else ()) for name in VARIANTS]
)
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


@pytest.mark.parametrize(
    ("settings", "data", "line"),
    [
        ({}, "b", "the run is finished: .* raise --max-steps.* another --out; the data has changed: .* nothing is"),
        ({"max_steps": 8}, "b", ", with max_steps=8 instead of 6; the data .* it is b instead of None; training goes"),
        ({"max_steps": 8, "lr": 1e-3}, None, ", with max_steps=8 instead of 6, lr=0.001 instead of 0.003; step 8/8"),
    ],
)
def test_a_resumed_run_reports_what_changed(learn, tmp_path, whole, tensors, settings, data, line):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    lines = learn(tmp_path, replace(CFG, **settings), data_fingerprint=data)
    assert re.match(f"resumed {tmp_path} at step 6.*{line}", "; ".join(lines)), lines
    assert (tensors(tmp_path) == tensors(whole)) == (not settings)


@pytest.mark.parametrize(("keep", "names"), [(1, [6]), (2, [4, 6]), (9, [2, 4, 6])])
def test_the_newest_checkpoints_are_kept(learn, tmp_path, keep, names):
    (tmp_path / "checkpoints/step-by-step").mkdir(parents=True)
    learn(tmp_path, replace(CFG, save_every=2, keep_checkpoints=keep))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [*(f"step-{name}" for name in names), "step-by-step"]


@pytest.mark.slow
def test_a_run_killed_ten_times_at_any_moment_finishes_with_the_same_weights(tmp_path, tensors):
    """kill -9, often while a checkpoint is being written, since one is written after every step."""
    settings = {"max_steps": 150, "gradient_accumulation_steps": 2, "lora_rank": 2, "save_every": 1}
    program = str(Path(__file__).parent / "distributed_program.py")
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "WORLD_SIZE": "1", "RANK": "0"}
    run, whole = (
        [sys.executable, program, str(tmp_path), json.dumps([[1, [[name, {"settings": settings}]]]])]
        for name in ("run", "whole")
    )
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
    def fill_disk():
        def write(descriptor, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", write)

    with pytest.raises(TrainingError, match="No space left on device; free some disk space and .* from .*step-3$"):
        learn(tmp_path, batch=before_batch(4, fill_disk, make_batch))


@pytest.fixture(scope="module")
def two_checkpoints(learn, tmp_path_factory):
    """A run with the checkpoints step-2 and step-4."""
    learn(folder := tmp_path_factory.mktemp("two"), STEPS)
    return folder


DAMAGES = [
    pytest.param(name, how, id=f"{how} {name}", marks=pytest.mark.full if how == "missing" else ())
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json")
    for how in ("cut", "missing")
]


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_damaged_checkpoint_is_replaced_from_an_older_one_or_reported(
    learn, tmp_path, two_checkpoints, tensors, name, how
):
    def damage(step):
        file = tmp_path / f"checkpoints/step-{step}" / name
        file.unlink() if how == "missing" else file.write_bytes(file.read_bytes()[:20])

    shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    damage(4)
    lines = learn(tmp_path, STEPS)
    assert "step-4 is damaged: " in lines[0] and name in lines[0] and "download" not in lines[0]
    assert lines[0].endswith(f"; resuming from {tmp_path / 'checkpoints/step-2'} instead")
    assert "at step 2" in lines[1] and tensors(tmp_path) == tensors(two_checkpoints)
    damage(4)
    damage(2)
    with pytest.raises(CheckpointError, match=rf"step-4 is damaged: .*{name}.*; move it away to start over$"):
        learn(tmp_path, STEPS)


def state_with(**changes):
    """Change keys of trainer.json; None removes one."""

    def change(folder):
        path = folder / "trainer.json"
        state = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))

    return change


def optimizer_with(change):
    """Change the dict of optimizer.safetensors in place."""

    def change_file(folder):
        tensors = load_file(folder / "optimizer.safetensors")
        change(tensors, min(name for name in tensors if name.endswith("/exp_avg_sq")))
        save_file(tensors, folder / "optimizer.safetensors")

    return change_file


def piped(name):
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


ODD = {
    "no config": state_with(config=None),
    "config is a list": state_with(config=[]),
    "an empty config": state_with(config={}),
    "a step below 0": state_with(step=-3),
    "another step": state_with(step=3),
    "a step of text": state_with(step="4"),
    "a step that is true": state_with(step=True),
    "scores of text": state_with(scores=[["a", "b"]]),
    "scores of triples": state_with(scores=[[1, 2, 3]]),
    "scores of nothing": state_with(scores=5),
    "a metric of numbers": state_with(metric=5),
    "no streams": state_with(streams=None),
    "a scaler of another kind": state_with(scaler={"a": 1}),
    "a tensor less": optimizer_with(lambda tensors, name: tensors.pop(name)),
    "a tensor more": optimizer_with(lambda tensors, name: tensors.update(more=torch.zeros(1))),
    "another shape": optimizer_with(lambda tensors, name: tensors.update({name: torch.zeros(7)})),
    "another dtype": optimizer_with(lambda tensors, name: tensors.update({name: tensors[name].half()})),
    "integers": optimizer_with(lambda tensors, name: tensors.update({name: tensors[name].int()})),
    "nan": optimizer_with(lambda tensors, name: tensors[name].fill_(float("nan"))),
    "inf": optimizer_with(lambda tensors, name: tensors[name].fill_(float("inf"))),
    "negative squares": optimizer_with(lambda tensors, name: tensors[name].fill_(-1.0)),
    "a pipe": piped("optimizer.safetensors"),
    "a pipe of weights": piped("model.safetensors"),
    "a pipe of settings": piped("trainer.json"),
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_of_whole_but_odd_files_the_older_checkpoint_is_taken(learn, tmp_path, two_checkpoints, tensors, change):
    shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    change(tmp_path / "checkpoints/step-4")
    lines = learn(tmp_path, STEPS)
    assert "step-4 is damaged: " in lines[0] and "\n" not in lines[0]
    assert lines[0].endswith(f"; resuming from {tmp_path / 'checkpoints/step-2'} instead")
    assert tensors(tmp_path) == tensors(two_checkpoints)


OTHER_MODELS = [{"lm_n_blocks": 3}, pytest.param({"lm_inter_dim": 40}, marks=pytest.mark.full), {"lm_re_base": 50.0}]


@pytest.mark.parametrize("change", OTHER_MODELS, ids=str)
def test_a_folder_of_another_model_is_refused_and_left_alone(tiny_model, learn, two_checkpoints, tensors, change):
    before = tensors(two_checkpoints)
    ((name, value),) = change.items()
    words = f"{name}={getattr(tiny_model().cfg, name)}, but this run has {name}={value}; resume with the same, or train"
    with pytest.raises(CheckpointError, match=f"step-4 was trained with {words}"):
        learn(two_checkpoints, model=tiny_model(0, lm_dropout=0.1, vit_dropout=0.1, **change))
    assert tensors(two_checkpoints) == before


@pytest.mark.parametrize(
    ("before", "now", "setting"),
    [
        ({}, {"freeze": ["vision"]}, r"freeze=\[\]"),
        ({}, {"lora_rank": 2}, "lora_rank=0"),
        ({}, {"optimizer": "muon"}, "optimizer=adamw"),
        ({"lora_rank": 2, "freeze": ["vision"]}, {"freeze": []}, r"freeze=\['vision'\]"),
        ({"lora_rank": 2}, {"lora_rank": 3}, "lora_rank=2"),
        ({"lora_rank": 2}, {"train_embeddings": False}, "train_embeddings=True"),
    ],
)
def test_a_run_cannot_be_resumed_with_other_parts_trained(learn, tmp_path, two_checkpoints, before, now, setting):
    cfg = replace(STEPS, max_steps=2, **before)
    learn(tmp_path, cfg) if before else shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match=f"was trained with {setting}, but this run has "):
        learn(tmp_path, replace(cfg, **now))


def test_a_part_without_gradients_yet_is_resumed(learn, make_batch, tmp_path):
    learn(tmp_path, replace(CFG, max_steps=3), lambda i: make_batch(i, images=False))
    assert learn(tmp_path, CFG)[0].startswith("resumed")
