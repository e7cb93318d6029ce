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

from nanovlm.training.metrics import read_metrics
from support import ROOT

PROGRAM = Path(__file__).parent / "distributed_program.py"
VARIANTS = {
    "all": {},
    "projector alone": {"gradient_accumulation_steps": 2, "freeze": ["vision", "language"]},
    "adapters": {"lora_rank": 2, "gradient_checkpointing": True},
}
KILL_AT = 7  # the number of the second process's batch in step 3
RUNS = [*VARIANTS.items(), ("uninterrupted", {}), ("uninterrupted, longer", {"gradient_accumulation_steps": 3})]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of all runs by several processes, and the exit codes of each group of them."""
    folder = tmp_path_factory.mktemp("distributed")
    longer = {"gradient_accumulation_steps": 3}
    runs = [(name, {"settings": settings}) for name, settings in RUNS]
    runs += [("stopped", {"settings": {}, "stop_at": 3}), ("stopped", {"settings": {}})]  # by the second process
    runs += [("killed", {"settings": {}}), ("two, then three", {"settings": longer, "stop_at": 7})]
    killed = [("killed", {"settings": {}, "kill_at": KILL_AT})]
    apart = [("apart", {"settings": {}, "apart": True})]
    then = [("two, then three", {"settings": {"gradient_accumulation_steps": 2}})]
    groups = [(2, killed), (2, apart), (2, runs), (3, then)]
    command = [sys.executable, str(PROGRAM), str(folder), json.dumps(groups)]
    process = subprocess.run(command, env=ENVIRONMENT, timeout=240, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    codes = (folder / "exit_codes").read_text().splitlines()
    assert codes == ["[1, -9]", "[1, 1]", "[0, 0]", "[0, 0, 0]"], process.stderr
    return folder


def alone(folder, **settings):
    """The same run by this process, from batches of two rows."""
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        import distributed_program
    finally:
        sys.path.pop(0)
    distributed_program.run(folder, settings, rows=2)


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
    alone(tmp_path, **VARIANTS[variant])
    ours, theirs = ({str(path.relative_to(run)) for path in run.rglob("*")} for run in (folder / variant, tmp_path))
    assert ours == theirs, "the same files"
    assert_same(folder / variant, tmp_path)
    for a, b in zip(*(read_metrics(run / "metrics.jsonl") for run in (folder / variant, tmp_path)), strict=True):
        assert a["step"] == b["step"]
        for key in {"loss", "grad_norm", "validation_loss", "lr"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-5)
    lines = [line for line in (folder / f"{variant}.0.log").read_text().splitlines() if line.startswith("step ")]
    assert len(lines) == 4 + 3
    assert not (folder / f"{variant}.1.log").read_text().strip(), "only the main process logs"


@pytest.mark.full
def test_a_signal_to_one_process_stops_both_and_they_are_resumed_together(folder):
    main, other = ((folder / f"stopped.{rank}.log").read_text() for rank in (0, 1))
    assert "SIGTERM: stopped at step 2" in main and "resumed" in main and "at step 2" in main
    assert "exit code 143" in main and "exit code 143" in other
    assert_same(folder / "stopped", folder / "uninterrupted", tolerance=0)


@pytest.mark.full
def test_a_run_whose_process_was_killed_is_run_again_to_the_same_file(folder):
    again, whole = (folder / name / "model.safetensors" for name in ("killed", "uninterrupted"))
    assert again.read_bytes() == whole.read_bytes()
    log = (folder / "killed.0.log").read_text()
    assert "error: another process ended" in log and "resumed" in log and "at step 2" in log
    assert not list((folder / "killed").rglob("*.tmp"))


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


@pytest.mark.slow
def test_torchrun_on_two_hosts_equals_one_process_and_restarts_after_a_kill(folder, tmp_path):
    """Two of torchrun's agents stand for two hosts; each starts the processes again when one of them is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--monitor-interval", "0.1"]
    flags += ["--rdzv-id", "run", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    groups = [(2, [("run", {"settings": {}, "kill_at": KILL_AT})])]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(PROGRAM), str(tmp_path), json.dumps(groups)]
    agents = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [agent.communicate(timeout=240)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "".join(errors)
    assert "resumed" in (tmp_path / "run.0.log").read_text() and (tmp_path / "run/killed").exists()
    alone(tmp_path / "one")
    assert_same(tmp_path / "run", tmp_path / "one")
