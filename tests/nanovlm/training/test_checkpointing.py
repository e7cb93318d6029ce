"""Whatever ends a run, and whatever it learns with, nothing is lost: what went on equals what was never stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nanovlm.errors import CheckpointError, TrainingError
from nanovlm.training import checkpointing as resuming
from nanovlm.training.checkpointing import Stopped
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import train
from support import ROOT

CFG = TrainConfig(steps=6, lr=3e-3, warmup=2, save_every=3, log_every=2, workers=0, dtype="float32")
WAYS = {
    "accumulation": {"accumulate": 2, "schedule": "cosine"},
    "adapters": {"lora_rank": 2, "accumulate": 2, "vision_rate": 0.0},
    "adapters alone": {"lora_rank": 2, "lora_words": False},
    "frozen parts": {"vision_rate": 0.0, "language_rate": 0.0},
    "rates": {"vision_rate": 0.1, "projector_rate": 2.0, "gradient_checkpointing": True},
    "float16": {"dtype": "float16", "steps": 12},
}


@pytest.fixture
def learn(tiny_model, words_and_images):
    """Train a tiny model, which drops at random, into folder; what was logged."""

    def learn(folder, cfg=CFG, batch=words_and_images, seed=0):
        lines = []
        train(tiny_model(seed, lm_dropout=0.1, vit_dropout=0.1), "{}", batch, cfg, folder, log=lines.append)
        return lines

    return learn


def tensors(folder):
    """Every number in a folder's files of tensors, bit for bit."""
    return {
        str(path.relative_to(folder)): {key: t.numpy().tobytes() for key, t in load_file(path).items()}
        for path in sorted(folder.rglob("*.safetensors"))
    }


def at(number, event, batch):
    """batch, and before this number of them the event."""

    def until(i):
        if i == number:
            event()
        return batch(i)

    return until


def fall():
    raise MemoryError


@pytest.mark.parametrize("way", WAYS)
def test_resumed_equals_uninterrupted_bit_for_bit(learn, words_and_images, tmp_path, way):
    cfg = replace(CFG, **WAYS[way])
    learn(tmp_path / "whole", cfg)
    learn(tmp_path / "other", replace(cfg, steps=1), seed=3)  # leaves torch's generator elsewhere
    with pytest.raises(MemoryError):
        learn(tmp_path / "run", cfg, at((cfg.steps - 2) * cfg.accumulate, fall, words_and_images))
    assert learn(tmp_path / "run", cfg)[0] == f"resumed {tmp_path / 'run'} at step {3 if cfg.steps == 6 else 9}"
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")
    states = [json.loads((tmp_path / run / f"checkpoints/step-{cfg.steps}/training.json").read_text())
              for run in ("run", "whole")]  # fmt: skip
    assert states[0] == states[1] and bool(states[0]["scaler"]) == (way == "float16")


# --------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_leaves(learn, words_and_images, tmp_path, number, code):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    learn(tmp_path / "whole")
    with pytest.raises(Stopped) as end:
        learn(tmp_path / "run", batch=at(1, lambda: os.kill(os.getpid(), number), words_and_images))
    assert end.value.code == code
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]
    assert learn(tmp_path / "run")[0].endswith("at step 2")
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_a_second_signal_stops_at_once(learn, words_and_images, tmp_path):
    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # the first is heard before the second comes, whichever thread gets it

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            learn(tmp_path, batch=at(1, twice, words_and_images))
    finally:
        signal.signal(signal.SIGINT, usual)
    assert not (tmp_path / "checkpoints").exists()


def test_a_signal_during_the_last_step_leaves_a_finished_run(learn, words_and_images, tmp_path):
    learn(tmp_path, batch=at(5, lambda: os.kill(os.getpid(), signal.SIGTERM), words_and_images))
    assert (tmp_path / "model.safetensors").exists()


def test_a_thread_trains_too(learn, tmp_path):
    """Where no handler of signals may be set."""
    thread = threading.Thread(target=learn, args=[tmp_path])
    thread.start()
    thread.join()
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_door_ends_with_one_line_and_the_shells_code(tmp_path, number, code):
    """The signal goes to all processes, also to the one that prepares batches, as Ctrl-C in a terminal does."""
    flags = ["--recipe", "scenes", "--batch-size", "1", "--no-compile", "--log-every", "1", "--workers", "1", "--out"]
    command = [sys.executable, str(ROOT / "train.py"), *flags, str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        for line in run.stderr:
            if line.startswith("step 2/"):
                break
        os.killpg(run.pid, number)
        rest = [line for line in run.stderr if not line.startswith("step ")]
    (saved,) = (tmp_path / "out/checkpoints").iterdir()
    assert run.returncode == code
    told = (
        f"stopped and saved {tmp_path / 'out'} at {saved.name.replace('-', ' ')}; run the same command again to go on"
    )
    assert rest == [f"{number.name}: {told}\n"]


PROGRAM = """
import sys, torch
sys.path.insert(0, "tests")
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm.data.examples import EncodedExample, collate
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import train

def batch(i):
    draw = torch.Generator().manual_seed(i)
    ids = [3] * 4 + torch.randint(4, 40, (9,), generator=draw).tolist()
    return collate([EncodedExample(ids, [-100] * 6 + ids[7:] + [4], [1] * 13, [torch.rand(1, 3, 16, 16, generator=draw)])])

torch.manual_seed(0)
model = VisionLanguageModel(VLMConfig(**TINY, lm_dropout=0.1), 3)
cfg = TrainConfig(steps=300, warmup=9, accumulate=2, lora_rank=2, save_every=1, log_every=1, workers=0, dtype="float32")
train(model, "{}", batch, cfg, sys.argv[1])
"""


@pytest.mark.slow
def test_killed_ten_times_at_any_moment_it_still_arrives(tmp_path):
    """kill -9, often while a checkpoint is being written, since one is after every step."""
    rng, starts = random.Random(0), []
    for kill in range(11):
        run = subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path / "run"], stderr=subprocess.PIPE, text=True,
                               cwd=ROOT)  # fmt: skip
        first = run.stderr.readline()
        starts.append(int(first.split("at step ")[1]) if "resumed" in first else 0)
        if kill < 10:
            for _ in range(rng.randrange(25)):
                run.stderr.readline()
            run.kill()
        _, told = run.communicate()
        assert run.returncode == (-9 if kill < 10 else 0), told
    assert starts == sorted(starts) and starts[-1] > 30
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "whole"], check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-300"]


# ------------------------------------------------------------------------------------------------------ going wrong


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
@pytest.mark.parametrize("last", [False, True], ids=["checkpoint", "model"])
def test_a_full_disk_is_a_sentence_and_loses_nothing(learn, tmp_path, monkeypatch, error, last):
    learn(tmp_path / "whole")
    write, written = resuming.write_model, []

    def full(folder, *args):
        written.append(folder)
        if len(written) == (3 if last else 2):
            (folder / "model.safetensors").write_bytes(b"half")
            raise error
        write(folder, *args)

    monkeypatch.setattr("nanovlm.training.checkpointing.write_model", full)
    monkeypatch.setattr("nanovlm.training.loop.write_model", full)
    with pytest.raises(TrainingError, match="No space left.*make room and run again to go on from") as caught:
        learn(tmp_path / "run")
    assert str(caught.value).endswith("step-6" if last else "step-3") and "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-6" if last else "step-3"]
    monkeypatch.undo()
    learn(tmp_path / "run")
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training.json", "config.json"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_checkpoint_is_a_sentence_with_the_way_out(learn, tmp_path, name, how):
    learn(tmp_path, replace(CFG, steps=3))
    file = tmp_path / "checkpoints/step-3" / name
    file.unlink() if how == "gone" else file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=rf"step-3 is damaged: .*{name}.*; move it away to begin again$"):
        learn(tmp_path)
    file.parent.rename(tmp_path / "away")
    assert learn(tmp_path)[0].startswith("step 2/6"), "from the start"


def test_other_frozen_parts_are_no_continuation(learn, tmp_path):
    learn(tmp_path, replace(CFG, vision_rate=0.0, steps=3))
    before = tensors(tmp_path)
    with pytest.raises(CheckpointError, match="no moments of vision_encoder.*go on with the same parts frozen"):
        learn(tmp_path)
    with pytest.raises(CheckpointError, match="has moments of MP.*go on with the same parts frozen"):
        learn(tmp_path, replace(CFG, vision_rate=0.0, projector_rate=0.0))
    assert tensors(tmp_path) == before


def test_a_part_that_no_batch_has_touched_goes_on_all_the_same(learn, words_and_images, tmp_path):
    def words(i):
        return words_and_images(i, images=False)

    learn(tmp_path, replace(CFG, steps=3), words)
    assert learn(tmp_path, CFG)[0].startswith("resumed")
    assert torch.isfinite(load_file(tmp_path / "model.safetensors")["MP.proj.weight"]).all()
