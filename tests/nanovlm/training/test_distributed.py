"""Two processes learn what one process learns from twice the batch, whatever their batches hold; one of them writes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanovlm.errors import InputError
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import exit_status, run_and_exit
from nanovlm.training.loop import train
from support import ROOT

PROGRAM = Path(__file__).parent / "distributed_program.py"
VARIANTS = {
    "all": {},
    "projector alone": {"gradient_accumulation_steps": 2, "vision_rate": 0.0, "language_rate": 0.0},
    "adapters": {"lora_rank": 2, "gradient_checkpointing": True},
    "sharded": {"fsdp": True, "gradient_accumulation_steps": 2},
    "adapters, sharded": {"fsdp": True, "lora_rank": 2, "gradient_checkpointing": True},
    "frozen encoder, sharded": {"fsdp": True, "vision_rate": 0.0},
}
BUCKET = {"all": 2000}  # bytes; half of the weights are smaller
INTERRUPTED = {  # settings of the run that SIGTERM stops, and of the run that resumes it
    "plain": ({}, {}),
    "sharded": ({"fsdp": True}, {"fsdp": True}),
    "sharded, then not": ({"fsdp": True}, {}),
}
SECOND_PROCESS_STEP_1 = 3  # the number of a batch


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of all runs by two processes, which share one start and one process group."""
    folder = tmp_path_factory.mktemp("distributed")
    runs = [(name, {"settings": settings, "bucket": BUCKET.get(name)}) for name, settings in VARIANTS.items()]
    runs.append(("uninterrupted", {"settings": {}}))
    for name, (first, then) in INTERRUPTED.items():
        runs.append((f"stopped, {name}", {"settings": first, "stop_at": SECOND_PROCESS_STEP_1}))
        runs.append((f"stopped, {name}", {"settings": then}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(PROGRAM), str(folder), json.dumps(runs)]
    processes = [
        subprocess.Popen(command, env=environment() | group | {"RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "".join(errors)
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
    """The names of all files, and of tensors the names, shapes and dtypes."""
    contents = {}
    for path in folder.rglob("*.*"):
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_equal_one_with_twice_the_batch(folder, tmp_path, variant):
    alone(tmp_path / "one", **VARIANTS[variant])
    assert files(folder / variant) == files(tmp_path / "one")
    two, one = weights(folder / variant), weights(tmp_path / "one")
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=1e-5)
    for a, b in zip(metrics(folder / variant), metrics(tmp_path / "one"), strict=True):
        assert a["step"] == b["step"]
        for key in {"loss", "grad_norm", "validation_loss", "lr"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-5)
    lines = [line for line in (folder / f"{variant}.0.log").read_text().splitlines() if line.startswith("step ")]
    assert len(lines) == 4 + 3
    assert not (folder / f"{variant}.1.log").read_text().strip(), "only the main process logs"


@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_signal_to_one_process_stops_both_and_they_are_resumed_together(folder, name):
    main, other = ((folder / f"stopped, {name}.{rank}.log").read_text() for rank in (0, 1))
    assert "SIGTERM: stopped and saved" in main and "resumed" in main and "at step 2" in main
    assert "exit code 143" in main and "exit code 143" in other
    ours, whole = weights(folder / f"stopped, {name}"), weights(folder / "uninterrupted")
    for weight in whole:
        if name == "plain":
            assert torch.equal(ours[weight], whole[weight])
        else:
            torch.testing.assert_close(ours[weight], whole[weight], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_torchrun_starts_the_processes(folder, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM)]
    runs = [("run", {"settings": {"fsdp": True}})]
    subprocess.run([*command, str(tmp_path), json.dumps(runs)], env=environment(), check=True, timeout=120)
    ours, whole = weights(tmp_path / "run"), weights(folder / "uninterrupted")
    for name in whole:
        torch.testing.assert_close(ours[name], whole[name], atol=1e-5, rtol=1e-5)


def test_fsdp_needs_several_processes(tiny_model, make_batch, tmp_path):
    with pytest.raises(InputError, match="this is one; start it by torchrun"):
        train(tiny_model(), "{}", make_batch, TrainConfig(fsdp=True, num_workers=0), tmp_path)


def test_a_process_under_torchrun_exits_at_once_with_its_code(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    assert run_and_exit(lambda: 3) == 3 and not codes, "a single process returns"
    monkeypatch.setenv("WORLD_SIZE", "2")
    run_and_exit(lambda: 0)
    run_and_exit(lambda: sys.exit(143))
    run_and_exit(lambda: sys.exit())
    with pytest.raises(ValueError):
        run_and_exit(lambda: int("none"))
    assert codes == [0, 143, 0]


def test_exit_status_is_that_of_python(capsys):
    for code in (None, 0, 3, True, "failed"):
        program = [sys.executable, "-c", f"import sys; sys.exit({code!r})"]
        assert exit_status(code) == subprocess.run(program, capture_output=True).returncode
    assert capsys.readouterr().err == "failed\n"
