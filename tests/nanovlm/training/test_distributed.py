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

pytestmark = pytest.mark.full
PROGRAM = Path(__file__).parent / "distributed_program.py"
VARIANTS = {
    "all": {},
    "projector alone": {"gradient_accumulation_steps": 2, "freeze": ["vision", "language"]},
    "adapters": {"lora_rank": 2, "gradient_checkpointing": True},
}
KILL_AT = {"kill_at": 7}  # the number of the second process's batch in step 3
LONGER = {"gradient_accumulation_steps": 3}
GROUPS = [
    (2, [("killed", KILL_AT)]),
    (2, [("apart", {"apart": True})]),
    (2, [(name, {"settings": settings}) for name, settings in VARIANTS.items()]),
    (2, [("stopped", {"stop_at": 3}), ("stopped", {}), ("killed", {})]),  # SIGTERM to the second process
    (2, [("two, then three", {"settings": LONGER, "stop_at": 7}), ("longer", {"settings": LONGER})]),
    (3, [("two, then three", {"settings": {"gradient_accumulation_steps": 2}})]),
    (1, [(f"{name}, alone", {"settings": settings, "rows": 2}) for name, settings in VARIANTS.items()]),
]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of all runs, and the exit codes of each group of processes."""
    folder = tmp_path_factory.mktemp("distributed")
    command = [sys.executable, str(PROGRAM), str(folder), json.dumps(GROUPS)]
    process = subprocess.run(command, env=ENVIRONMENT, timeout=240, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    codes = (folder / "exit_codes").read_text().splitlines()
    assert codes == ["[1, -9]", "[1, 1]", *3 * ["[0, 0]"], "[0, 0, 0]", "[0]"], process.stderr
    return folder


def assert_same(folder, other, tolerance=1e-5):
    """Compare the final weights, without the bias of keys: it changes no softmax, so its gradient is noise."""
    ours, theirs = (load_file(run / "model.safetensors") for run in (folder, other))
    for name in ours:
        if name.endswith("qkv_proj.bias") and tolerance:
            ours[name][16:32] = theirs[name][16:32]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_equal_one_with_twice_the_batch(folder, variant):
    runs = (folder / variant, folder / f"{variant}, alone")
    ours, theirs = ({str(path.relative_to(run)) for path in run.rglob("*")} for run in runs)
    assert ours == theirs, "the same files"
    assert_same(*runs)
    for a, b in zip(*(read_metrics(run / "metrics.jsonl") for run in runs), strict=True):
        assert a["step"] == b["step"]
        for key in {"loss", "grad_norm", "validation_loss", "lr"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-5)
    lines = [line for line in (folder / f"{variant}.0.log").read_text().splitlines() if line.startswith("step ")]
    assert len(lines) == 4 + 3
    assert not (folder / f"{variant}.1.log").read_text().strip(), "only the main process logs"


def test_runs_that_were_stopped_or_killed_or_had_two_processes_are_resumed(folder):
    main, other = ((folder / f"stopped.{rank}.log").read_text() for rank in (0, 1))
    assert "SIGTERM: stopped at step 2" in main and "resumed" in main and "at step 2" in main
    assert "exit code 143" in main and "exit code 143" in other
    assert_same(folder / "stopped", folder / "all", tolerance=0)
    assert_same(folder / "killed", folder / "all", tolerance=0)
    log = (folder / "killed.0.log").read_text()
    assert "error: another process ended" in log and "resumed" in log and "at step 2" in log
    assert not list((folder / "killed").rglob("*.tmp"))
    assert "at step 2" in (folder / "two, then three.0.log").read_text()
    assert_same(folder / "two, then three", folder / "longer")


def test_a_folder_that_is_not_shared_is_reported_before_the_first_step(folder):
    for rank in (0, 1):
        (line,) = (folder / f"apart.{rank}.log").read_text().splitlines()
        assert "is not the same folder for all 2 processes: 1 see what the first one writes" in line
        assert list((folder / "apart" / str(rank)).iterdir()) == []


@pytest.mark.slow
def test_torchrun_on_two_hosts_equals_one_process_and_restarts_after_a_kill(folder, tmp_path):
    """Two agents stand for two hosts. One store, the default, holds killed processes: pytorch/pytorch#135712."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--monitor-interval", "0.1"]
    flags += ["--rdzv-id", "run", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    arguments = [str(PROGRAM), str(tmp_path), json.dumps([(2, [("run", KILL_AT)])])]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, *arguments]
    environment = ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [agent.communicate(timeout=240)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "".join(errors)
    assert "resumed" in (tmp_path / "run.0.log").read_text() and (tmp_path / "run/killed").exists()
    assert_same(tmp_path / "run", folder / "all, alone")
