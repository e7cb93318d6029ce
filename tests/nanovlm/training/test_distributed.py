"""Two processes learn what one learns from twice the batch, whatever their batches hold, and one of them writes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import run_and_exit
from nanovlm.training.loop import train
from support import ROOT

PROGRAM = """
import json, os, sys, torch
sys.path[:0] = [".", "tests"]
import nanovlm.training.distributed
from support import TINY, randomise
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm.data.examples import EncodedExample, collate
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import train

folder, settings = sys.argv[1], json.loads(sys.argv[2])
nanovlm.training.distributed.SMALL = settings.pop("small", nanovlm.training.distributed.SMALL)
together, stop_at = settings.pop("together", 1), settings.pop("stop_at", None)

def row(i):
    draw = torch.Generator().manual_seed(i)
    n_images = (1, 0, 5, 0, 0, 1)[i % 6]  # words alone, many pictures, words alone on both
    ids = [3] * 4 * n_images + torch.randint(4, 40, (5 + i % 7,), generator=draw).tolist()
    asked = 1 + i % 4
    targets = [-100] * (len(ids) - asked) + torch.randint(4, 40, (asked,), generator=draw).tolist()
    images = [torch.rand(n_images, 3, 16, 16, generator=draw)] if n_images else []
    return EncodedExample(ids, targets, [1] * len(ids), images)

def batch(i):
    if i == stop_at:
        os.kill(os.getpid(), 15)
    return collate([row(i * together + j) for j in range(together)])

torch.manual_seed(0 if settings.get("lora_rank") else int(os.environ.get("RANK", 0)))  # others' weights do not count
model = randomise(VisionLanguageModel(VLMConfig(**TINY), 3))
cfg = TrainConfig(**{"warmup": 0, "decay": 0, "lr": 1e-3, "workers": 0, "log_every": 1, "dtype": "float32"} | settings)
learned = lambda: train(model, "{}", batch, cfg, folder, validation=lambda i: batch(48 // together + i))
nanovlm.training.distributed.run_and_exit(lambda: int(learned() is None))
"""


def run(folder, processes=1, check=True, **settings):
    """Train in so many processes; what was said on standard error, and how it ended."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    program = folder.parent / "program.py"
    program.write_text(PROGRAM)
    command = [*start, str(program), str(folder), json.dumps(settings)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 or not check, ended.stderr
    return ended


def files(folder):
    """What was written, but for what the steps were like: of a file of tensors, their names and shapes."""
    found = {}
    for path in folder.rglob("*.*"):
        tensors = load_file(path) if path.suffix == ".safetensors" else {}
        found[str(path.relative_to(folder))] = {name: (t.shape, t.dtype) for name, t in tensors.items()}
    return found


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"small": 2000}, id="all"),  # bytes, more or less than which half of the weights have
        pytest.param({"accumulate": 2, "vision_rate": 0.0, "language_rate": 0.0}, id="projector alone"),
        pytest.param({"lora_rank": 2, "gradient_checkpointing": True}, id="adapters", marks=pytest.mark.slow),
        pytest.param({"fsdp": True, "accumulate": 2}, id="sharded"),
        pytest.param(
            {"fsdp": True, "lora_rank": 2, "gradient_checkpointing": True},
            id="adapters, sharded",
            marks=pytest.mark.slow,
        ),
        pytest.param({"fsdp": True, "vision_rate": 0.0}, id="frozen encoder, sharded", marks=pytest.mark.slow),
    ],
)
def test_two_processes_are_one_with_twice_the_batch(tmp_path, settings):
    ended = run(tmp_path / "two", 2, steps=4, **settings)
    run(tmp_path / "one", 1, steps=4, together=2, validation_batches=4, **settings | {"fsdp": False})
    assert files(tmp_path / "two") == files(tmp_path / "one")
    two, one = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name in one:
        if name.endswith("qkv_proj.bias"):  # a bias of keys changes no softmax: its gradient is noise
            two[name][16:32] = one[name][16:32]
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=1e-5)
    for a, b in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        assert a["step"] == b["step"]
        for key in {"loss", "grad_norm", "validation_loss", "lr"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-5)
    said = [line for line in ended.stderr.splitlines() if line.startswith("step ")]
    assert len(said) == 4 + 2, "each line once"


@pytest.mark.slow
def test_a_signal_to_one_stops_both_and_they_go_on_together(tmp_path):
    run(tmp_path / "whole", 2, steps=4)
    ended = run(tmp_path / "run", 2, check=False, steps=4, stop_at=3)  # a batch of the second process, in step 1
    assert ended.returncode != 0 and "SIGTERM: stopped and saved" in ended.stderr
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]
    assert "at step 2" in run(tmp_path / "run", 2, steps=4).stderr
    ours, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_a_sharded_run_that_stopped_goes_on_sharded_or_not(tmp_path):
    run(tmp_path / "whole", 2, steps=4)
    for name, fsdp in (("sharded", True), ("not", False)):
        ended = run(tmp_path / name, 2, check=False, steps=4, stop_at=3, fsdp=True)
        assert ended.returncode != 0 and "SIGTERM: stopped and saved" in ended.stderr
        assert "at step 2" in run(tmp_path / name, 2, steps=4, fsdp=fsdp).stderr
        ours, whole = (load_file(tmp_path / folder / "model.safetensors") for folder in (name, "whole"))
        for weight in whole:
            if not weight.endswith("qkv_proj.bias"):
                torch.testing.assert_close(ours[weight], whole[weight], atol=1e-5, rtol=1e-5)


def test_one_process_is_not_divided(tiny_model, words_and_images, tmp_path):
    with pytest.raises(ValueError, match="this is one; torchrun"):
        train(tiny_model(), "{}", words_and_images, TrainConfig(fsdp=True, workers=0), tmp_path)


def test_one_of_several_processes_ends_at_once_with_the_code_it_would_have_had(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    assert run_and_exit(lambda: 3) == 3 and not codes, "alone, it goes on"
    monkeypatch.setenv("WORLD_SIZE", "2")
    run_and_exit(lambda: 0)
    run_and_exit(lambda: sys.exit(143))
    with pytest.raises(ValueError):
        run_and_exit(lambda: int("none"))
    assert codes == [0, 143]
