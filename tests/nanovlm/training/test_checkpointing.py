"""Whatever interrupts a run, it is resumed to the same weights, bit for bit, as if it had not been interrupted."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nanovlm.errors import CheckpointError, TrainingError, UsageError
from nanovlm.training import checkpointing
from nanovlm.training.checkpointing import write_model
from nanovlm.training.config import TrainConfig
from support import ROOT
from support.training import CFG, train

VARIANTS = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "adapters": {"lora_rank": 2, "gradient_accumulation_steps": 2, "freeze": ["vision"]},
    "adapters alone": {"lora_rank": 2, "train_embeddings": False},
    "frozen parts": {"freeze": ["vision", "language"], "gradient_checkpointing": True},
    "muon": {"optimizer": "muon", "gradient_accumulation_steps": 2},
    "float16": {"dtype": "float16", "max_steps": 12},
}
RARE = ("adapters alone", "frozen parts")  # resumed as others are


def tensors(folder):
    """Every tensor in a folder's files, bit for bit."""
    return {
        str(path.relative_to(folder)): {key: t.numpy().tobytes() for key, t in load_file(path).items()}
        for path in sorted(folder.rglob("*.safetensors"))
    }


@pytest.fixture(scope="module")
def uninterrupted(learn, tmp_path_factory):
    """The tensors of a run of CFG without interruption."""
    learn(folder := tmp_path_factory.mktemp("uninterrupted"))
    return tensors(folder)


def before_batch(number, action, batch):
    """batch, which calls the action before it returns the batch of this number."""

    def get_batch(i):
        if i == number:
            action()
        return batch(i)

    return get_batch


def fail():
    raise MemoryError


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.full if name in RARE else ()) for name in VARIANTS]
)
def test_resumed_run_equals_uninterrupted_bit_for_bit(learn, make_batch, tmp_path, variant):
    cfg = replace(CFG, **VARIANTS[variant])
    learn(tmp_path / "whole", cfg)
    torch.manual_seed(3)  # leaves torch's generator elsewhere
    failing = before_batch((cfg.max_steps - 2) * cfg.gradient_accumulation_steps, fail, make_batch)
    with pytest.raises(MemoryError):
        learn(tmp_path / "run", cfg, failing)
    lines = learn(tmp_path / "run", cfg, seed=0 if cfg.lora_rank else 8)  # the checkpoint's weights count
    assert lines[0] == f"resumed {tmp_path / 'run'} at step {3 if cfg.max_steps == 6 else 9}"
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")
    name = f"checkpoints/step-{cfg.max_steps}/trainer.json"
    state, expected = (json.loads((tmp_path / run / name).read_text()) for run in ("run", "whole"))
    assert state == expected and bool(state["scaler"]) == (variant == "float16")


def test_the_same_run_twice_writes_the_same_files_and_a_third_time_trains_nothing(
    learn, make_batch, tmp_path, uninterrupted
):
    for batch in (make_batch, before_batch(0, fail, make_batch)):
        learn(tmp_path, batch=batch)
        assert tensors(tmp_path) == uninterrupted
    assert uninterrupted["model.safetensors"] == uninterrupted["checkpoints/step-6/model.safetensors"]
    kinds = {path.suffix for path in tmp_path.rglob("*.*") if path.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors"}, "numbers and text, nothing that could run"
    state = json.loads((tmp_path / "checkpoints/step-6/trainer.json").read_text())
    assert (state["config"].pop("validation"), state["config"].pop("data")) == (0, None)
    assert state["step"] == 6 and TrainConfig(**state["config"]) == CFG


def test_a_resumed_run_reports_what_changed_and_whether_it_was_finished(learn, tmp_path):
    learn(tmp_path, replace(CFG, max_steps=3), data_fingerprint="a")
    lines = learn(tmp_path, replace(CFG, max_steps=3), data_fingerprint="b")
    assert re.fullmatch("resumed .* at step 3; the run is finished: .* raise --max-steps.* another --out", lines[0])
    assert lines[1] == "the data has changed: it is b instead of a; nothing is learned from it"
    lines = learn(tmp_path, replace(CFG, lr=1e-3), data_fingerprint="b")
    assert lines[0] == f"resumed {tmp_path} at step 3, with max_steps=6 instead of 3, lr=0.001 instead of 0.003"
    assert lines[1] == "the data has changed: it is b instead of a; training goes on with it"


@pytest.mark.parametrize(("keep", "names"), [(1, [6]), (2, [4, 6]), (9, [2, 4, 6])])
def test_the_newest_checkpoints_are_kept(learn, tmp_path, keep, names):
    (tmp_path / "checkpoints/step-by-step").mkdir(parents=True)
    learn(tmp_path, replace(CFG, save_every=2, keep_checkpoints=keep))
    assert checkpoints(tmp_path) == [*(f"step-{name}" for name in names), "step-by-step"]


def test_what_a_killed_save_left_behind_is_removed(learn, tmp_path):
    (tmp_path / "checkpoints/.0123456789abcdef.tmp").mkdir(parents=True)
    (tmp_path / ".0123456789abcdef.tmp").mkdir()  # of a final model
    (tmp_path / ".run.json.tmp").touch()
    learn(tmp_path)
    assert os.listdir(tmp_path / "checkpoints") == ["step-6"] and not list(tmp_path.glob(".*.tmp"))


def test_what_a_run_writes_is_not_removed_by_another_that_is_refused(learn, tmp_path, monkeypatch):
    def refuse(context, folder):
        raise UsageError(f"{folder}: another run writes there")

    (tmp_path / ".0123456789abcdef.tmp").mkdir()
    monkeypatch.setattr("nanovlm.training.loop.DistributedContext.claim", refuse)
    with pytest.raises(UsageError, match="another run"):
        learn(tmp_path)
    assert list(tmp_path.glob(".*.tmp"))


PROGRAM = """
import logging, sys, torch
from pathlib import Path
from distributed_program import run

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.set_num_threads(1)
settings = {"max_steps": 300, "gradient_accumulation_steps": 2, "lora_rank": 2, "save_every": 1}
run(Path(sys.argv[1]), settings)
"""


@pytest.mark.slow
def test_a_run_killed_ten_times_at_any_moment_finishes_with_the_same_weights(tmp_path):
    """kill -9, often while a checkpoint is being written, since one is written after every step."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}"}
    rng, starts = random.Random(0), []
    for kill in range(11):
        command = [sys.executable, "-c", PROGRAM, tmp_path / "run"]
        run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
        first = run.stderr.readline()
        starts.append(int(first.split("at step ")[1]) if "resumed" in first else 0)
        if kill < 10:
            for _ in range(rng.randrange(25)):
                run.stderr.readline()
            run.kill()
        _, stderr = run.communicate()
        assert run.returncode == (-9 if kill < 10 else 0), stderr
    assert starts == sorted(starts) and starts[-1] > 30
    command = [sys.executable, "-c", PROGRAM, tmp_path / "whole"]
    subprocess.run(command, check=True, cwd=ROOT, stderr=subprocess.DEVNULL, env=env)
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-300")] == ["step-300"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
@pytest.mark.parametrize(("failing", "last"), [(2, "step-3"), (3, "step-6")], ids=["checkpoint", "model"])
def test_a_full_disk_is_one_line_and_loses_nothing(learn, tmp_path, monkeypatch, uninterrupted, error, failing, last):
    calls = []

    def write_until_full(folder, *args, **options):
        calls.append(folder)
        if len(calls) == failing:
            (folder / "model.safetensors").write_bytes(b"half")
            raise error
        write_model(folder, *args, **options)

    monkeypatch.setattr(checkpointing, "write_model", write_until_full)
    remedy = "No space left.*free some disk space and run the same command again to resume from"
    with pytest.raises(TrainingError, match=remedy) as caught:
        learn(tmp_path)
    assert str(caught.value).endswith(last) and "\n" not in str(caught.value)
    assert checkpoints(tmp_path) == [last]
    monkeypatch.undo()
    learn(tmp_path)
    assert tensors(tmp_path) == uninterrupted


DAMAGES = [
    pytest.param(name, how, id=f"{how} {name}", marks=pytest.mark.full if how == "missing" else ())
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json")
    for how in ("cut", "missing")
]


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_damaged_checkpoint_is_skipped_for_an_older_one_or_reported(learn, tmp_path, name, how):
    learn(tmp_path, replace(CFG, save_every=2, max_steps=4, keep_checkpoints=2, decay=0.0))
    for step in (4, 2):
        file = tmp_path / f"checkpoints/step-{step}" / name
        file.unlink() if how == "missing" else file.write_bytes(file.read_bytes()[:20])
        if step == 4:
            lines = learn(tmp_path, replace(CFG, max_steps=3, keep_checkpoints=9))
            older = tmp_path / "checkpoints/step-2"
            assert "step-4 is damaged: " in lines[0] and name in lines[0] and "download" not in lines[0]
            assert lines[0].endswith(f"; resuming from {older} instead") and "at step 2" in lines[1]
            (tmp_path / "checkpoints/step-3").rename(tmp_path / "step-3")
    with pytest.raises(CheckpointError, match=rf"step-4 is damaged: .*{name}.*; move it away to start over$"):
        learn(tmp_path)
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    assert learn(tmp_path)[0].startswith("step 2/6"), "from the start"


def test_a_run_past_a_damaged_checkpoint_replaces_it(learn, tmp_path, uninterrupted):
    learn(tmp_path, replace(CFG, keep_checkpoints=2))
    file = tmp_path / "checkpoints/step-6/model.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    learn(tmp_path)
    assert tensors(tmp_path) == uninterrupted


@pytest.mark.parametrize(
    "change",
    [{"lm_n_blocks": 3}, pytest.param({"lm_inter_dim": 40}, marks=pytest.mark.full), {"lm_re_base": 50.0}],
    ids=str,
)
def test_a_folder_of_another_model_is_refused_and_left_alone(tiny_model, make_batch, tmp_path, change):
    cfg = replace(CFG, max_steps=3)
    train(tiny_model(), "{}", make_batch, cfg, tmp_path)
    before = tensors(tmp_path)
    with pytest.raises(CheckpointError, match="step-3") as caught:
        train(tiny_model(**change), "{}", make_batch, cfg, tmp_path)
    ((name, value),) = change.items()
    message = str(caught.value)
    assert f"a model with {name}={getattr(tiny_model().cfg, name)}, but this one has {name}={value}" in message
    assert len(message.splitlines()) == 1
    assert tensors(tmp_path) == before


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_cannot_be_resumed_with_other_parts_frozen(learn, tmp_path, rank):
    cfg = replace(CFG, lora_rank=rank)
    learn(tmp_path, replace(cfg, freeze=["vision"], max_steps=3))
    before = tensors(tmp_path)
    with pytest.raises(CheckpointError, match="no moments of vision_encoder.*resume with the same parts frozen"):
        learn(tmp_path, cfg)
    with pytest.raises(CheckpointError, match="has moments of MP.*resume with the same parts frozen"):
        learn(tmp_path, replace(cfg, freeze=["vision", "projector"]))
    with pytest.raises(CheckpointError, match=f"lora_rank={rank}; resume with the same"):
        learn(tmp_path, replace(cfg, lora_rank=2 - rank))
    if not rank:
        with pytest.raises(CheckpointError, match="was trained with optimizer=adamw; resume with the same"):
            learn(tmp_path, replace(cfg, freeze=["vision"], optimizer="muon"))
    assert tensors(tmp_path) == before


def test_a_part_without_gradients_yet_is_resumed(learn, make_batch, tmp_path):
    def text_only(i):
        return make_batch(i, images=False)

    learn(tmp_path, replace(CFG, max_steps=3), text_only)
    assert learn(tmp_path, CFG)[0].startswith("resumed")
    assert torch.isfinite(load_file(tmp_path / "model.safetensors")["MP.proj.weight"]).all()
