"""Two processes learn what one process learns from twice the batch, whatever their batches hold; one of them writes."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.vision_language_model import VisionLanguageModel
from nanovlm.cli import main as cli
from nanovlm.errors import CheckpointError, InputError
from nanovlm.training.checkpointing import load_newest, merge_checkpoint
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import run_and_exit
from nanovlm.training.loader import TrainingInterrupted
from support import ROOT
from support.training import train

PROGRAM = Path(__file__).parent / "distributed_program.py"
VARIANTS = {
    "all": {},
    "projector alone": {"gradient_accumulation_steps": 2, "vision_lr_scale": 0.0, "language_lr_scale": 0.0},
    "adapters": {"lora_rank": 2, "gradient_checkpointing": True},
    "sharded": {"fsdp": True, "gradient_accumulation_steps": 2},
    "adapters, sharded": {"fsdp": True, "lora_rank": 2, "gradient_checkpointing": True},
    "frozen encoder, sharded": {"fsdp": True, "vision_lr_scale": 0.0},
}
BUCKET = {"all": 2000}  # bytes; half of the weights are smaller
INTERRUPTED = {  # settings of the run that SIGTERM stops, and of the run that resumes it
    "plain": ({}, {}),
    "sharded": ({"fsdp": True}, {"fsdp": True}),
    "sharded, then not": ({"fsdp": True}, {}),
    "not sharded, then so": ({}, {"fsdp": True}),
    "adapters, sharded": (VARIANTS["adapters, sharded"],) * 2,
}
WHOLE = {"": {}, ", sharded": {"fsdp": True}, ", longer": {"gradient_accumulation_steps": 3}}
SECOND_PROCESS_STEP_1 = 3  # the number of a batch
KILLED = {  # runs whose second process is killed in step 3, or while it saves the checkpoint of step 4
    "killed": {"settings": {}, "kill_at": 7},
    "killed, sharded": {"settings": {"fsdp": True}, "kill_at": 7},
    "killed in a save, sharded": {"settings": {"fsdp": True}, "kill_in_save": 4},
}


ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of all runs by several processes, and the exit codes of each group of them."""
    folder = tmp_path_factory.mktemp("distributed")
    runs = [(name, {"settings": settings, "bucket": BUCKET.get(name)}) for name, settings in VARIANTS.items()]
    runs += [(f"uninterrupted{name}", {"settings": settings}) for name, settings in WHOLE.items()]
    for name, (first, then) in INTERRUPTED.items():
        runs.append((f"stopped, {name}", {"settings": first, "stop_at": SECOND_PROCESS_STEP_1}))
        runs.append((f"stopped, {name}", {"settings": then}))
    runs += [(name, {"settings": options["settings"]}) for name, options in KILLED.items()]  # after they were killed
    runs.append(("two, then three", {"settings": {"fsdp": True, "gradient_accumulation_steps": 3}, "stop_at": 7}))
    then = [("two, then three", {"settings": {"fsdp": True, "gradient_accumulation_steps": 2}})]
    apart = [("apart", {"settings": {}, "apart": True})]
    groups = [*((2, [run]) for run in KILLED.items()), (2, apart), (2, runs), (3, then)]
    command = [sys.executable, str(PROGRAM), str(folder), json.dumps(groups)]
    process = subprocess.run(command, env=ENVIRONMENT, timeout=240, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    codes = (folder / "exit_codes").read_text().splitlines()
    assert codes == [*["[1, -9]"] * len(KILLED), "[1, 1]", "[0, 0]", "[0, 0, 0]"], process.stderr
    return folder


def alone(folder, **settings):
    """The same run by this process, from batches of two rows."""
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        import distributed_program
    finally:
        sys.path.pop(0)
    distributed_program.run(folder, settings | {"fsdp": False, "validation_batches": 4}, rows=2)


def files(folder):
    """The names of all files except in checkpoints, and of tensors the names, shapes and dtypes."""
    contents = {}
    for path in folder.rglob("*.*"):
        if "checkpoints" in path.relative_to(folder).parts:
            continue
        tensors = load_file(path) if path.suffix == ".safetensors" else {}
        contents[str(path.relative_to(folder))] = {name: (t.shape, t.dtype) for name, t in tensors.items()}
    return contents


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    """The final weights, without the bias of keys: it changes no softmax, so its gradient is noise."""
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("qkv_proj.bias"):
            tensors[name][16:32] = 0
    return tensors


def assert_same(folder, other, tolerance=1e-5):
    torch.testing.assert_close(weights(folder), weights(other), atol=tolerance, rtol=tolerance)


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_equal_one_with_twice_the_batch(folder, tmp_path, variant):
    alone(tmp_path / "one", **VARIANTS[variant])
    assert files(folder / variant) == files(tmp_path / "one")
    assert_same(folder / variant, tmp_path / "one")
    for a, b in zip(metrics(folder / variant), metrics(tmp_path / "one"), strict=True):
        assert a["step"] == b["step"]
        for key in {"loss", "grad_norm", "validation_loss", "lr"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-5)
    lines = [line for line in (folder / f"{variant}.0.log").read_text().splitlines() if line.startswith("step ")]
    assert len(lines) == 4 + 3
    assert not (folder / f"{variant}.1.log").read_text().strip(), "only the main process logs"


@pytest.mark.full
@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_signal_to_one_process_stops_both_and_they_are_resumed_together(folder, name):
    main, other = ((folder / f"stopped, {name}.{rank}.log").read_text() for rank in (0, 1))
    assert "SIGTERM: stopped and saved" in main and "resumed" in main and "at step 2" in main
    assert "exit code 143" in main and "exit code 143" in other
    whole = folder / (name if name in VARIANTS and name != "sharded" else "uninterrupted")
    assert_same(folder / f"stopped, {name}", whole, tolerance=0 if name == "plain" else 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("variant", [variant for variant, settings in VARIANTS.items() if "fsdp" in settings])
def test_a_sharded_checkpoint_is_merged_to_the_model_that_one_process_saves(folder, tmp_path, variant, step):
    alone(tmp_path / "one", **VARIANTS[variant])
    checkpoint, whole = (run / f"checkpoints/step-{step}" for run in (folder / variant, tmp_path / "one"))
    assert cli.main(["merge", str(checkpoint), "--out", str(tmp_path / "merged")]) == 0
    for name in ("optimizer.safetensors", "training.json"):
        (whole / name).unlink()
    assert files(tmp_path / "merged") == files(whole)
    assert_same(tmp_path / "merged", whole)
    assert VisionLanguageModel.from_pretrained(tmp_path / "merged").image_token_id == 3


@pytest.mark.full
def test_no_process_writes_more_of_a_sharded_checkpoint_than_its_part(folder):
    whole = folder / "all/checkpoints/step-4"
    total = sum((whole / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors"))
    checkpoint = folder / "frozen encoder, sharded/checkpoints/step-4"
    assert not (checkpoint / "model.safetensors").exists()
    names = set()
    for shard in ("shard-00001", "shard-00002"):
        parts = [load_file(path) for path in (checkpoint / "shards").glob(f"{shard}-*")]
        sizes = [tensor.nbytes for part in parts for tensor in part.values()]
        assert 0 < sum(sizes) < 0.6 * total
        names |= {name for part in parts for name in part}
    assert "model.decoder.head.weight" in names and "optimizer.decoder.token_embedding.weight/exp_avg" in names


@pytest.mark.full
@pytest.mark.parametrize("name", KILLED)
def test_a_run_whose_process_was_killed_is_run_again_to_the_same_file(folder, name):
    whole = folder / ("uninterrupted, sharded" if "sharded" in name else "uninterrupted")
    assert (folder / name / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    log = (folder / f"{name}.0.log").read_text()
    assert "error: another process ended" in log and "resumed" in log and "at step 2" in log
    assert not list((folder / name).rglob("*.tmp"))


@pytest.mark.full
def test_a_folder_that_is_not_shared_is_reported_before_the_first_step(folder):
    for rank in (0, 1):
        (line,) = (folder / f"apart.{rank}.log").read_text().splitlines()
        assert "is not the same folder for all 2 processes: 1 see what the first one writes" in line
        assert list((folder / "apart" / str(rank)).iterdir()) == []


@pytest.mark.full
def test_three_processes_resume_what_two_have_written(folder):
    assert "at step 2" in (folder / "two, then three.0.log").read_text()
    assert_same(folder / "two, then three", folder / "uninterrupted, longer")


@pytest.mark.full
@pytest.mark.parametrize("damage", ["missing", "cut", "overwritten"])
def test_a_damaged_sharded_checkpoint_is_not_loaded(folder, tmp_path, damage, tiny_model, caplog):
    shutil.copytree(folder / "uninterrupted, sharded/checkpoints", tmp_path / "checkpoints")
    shard = next((tmp_path / "checkpoints/step-4/shards").glob("shard-00002-*"))
    content = shard.read_bytes()
    shard.unlink() if damage == "missing" else shard.write_bytes(
        content[:-1] if damage == "cut" else b"x" * len(content)
    )
    newest = load_newest(tmp_path, tiny_model())
    assert newest.step == 2 and f"{shard} " in caplog.text and "instead" in caplog.text
    with pytest.raises(CheckpointError, match="step-4 is damaged"):
        merge_checkpoint(tmp_path / "checkpoints/step-4", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.full
def test_merge_refuses_what_is_not_sharded(folder, tmp_path, capsys):
    checkpoint = folder / "all/checkpoints/step-4"
    assert cli.main(["merge", str(checkpoint), "--out", str(tmp_path / "merged")]) == 2
    assert "is not sharded: it holds a complete model" in capsys.readouterr().err
    assert cli.main(["merge", str(tmp_path), "--out", str(tmp_path / "merged")]) == 2
    assert "has no config.json" in capsys.readouterr().err
    sharded = folder / "sharded/checkpoints/step-4"
    with pytest.raises(CheckpointError, match=f"is sharded; make a model of it: nanovlm merge {sharded} --out FOLDER"):
        VisionLanguageModel.from_pretrained(sharded)


@pytest.mark.slow
def test_torchrun_on_two_hosts_equals_one_process_and_restarts_after_a_kill(folder, tmp_path):
    """Two of torchrun's agents stand for two hosts; each starts the processes again when one of them is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--monitor-interval", "0.1"]
    flags += ["--rdzv-id", "run", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    groups = [(2, [("run", {"settings": {"fsdp": True}, "kill_at": 7})])]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(PROGRAM), str(tmp_path), json.dumps(groups)]
    agents = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [agent.communicate(timeout=240)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "".join(errors)
    assert "resumed" in (tmp_path / "run.0.log").read_text() and (tmp_path / "run/killed").exists()
    alone(tmp_path / "one")
    assert_same(tmp_path / "run", tmp_path / "one")


def test_fsdp_needs_several_processes(tiny_model, make_batch, tmp_path):
    with pytest.raises(InputError, match="this is one; start it by torchrun"):
        train(tiny_model(), "{}", make_batch, TrainConfig(fsdp=True, num_workers=0), tmp_path)


def test_a_process_under_torchrun_exits_at_once_with_its_code(monkeypatch):
    def interrupted():
        raise TrainingInterrupted(143)

    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    assert run_and_exit(lambda: 3) == 3 and not codes, "a single process returns"
    monkeypatch.setenv("WORLD_SIZE", "2")
    run_and_exit(lambda: 0)
    run_and_exit(interrupted)
    with pytest.raises(ValueError):
        run_and_exit(lambda: int("none"))
    assert codes == [0, 143]
