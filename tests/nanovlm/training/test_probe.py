"""The plan of a run, against the same run: what it counts, what it times, and the memory that the run really needs."""

import os
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from nanovlm import EMBEDDED
from nanovlm.errors import TrainingError
from nanovlm.synthetic import caption, draw, random_scene
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import TrainingTask
from nanovlm.training.probe import MARGIN, PROBED_STEPS, Probe, estimate_run, memory_errors
from support import ROOT
from support.logs import log_lines

CFG = TrainConfig(max_steps=40, num_workers=0, dtype="float32", log_every=100, save_every=10)


@pytest.fixture
def probed(tiny_model, tmp_path):
    """The estimate for a tiny model with changed settings."""

    def probed(get_batch, **changes):
        folder = tmp_path / f"probe-{len(list(tmp_path.iterdir()))}"  # a new one: training would be resumed
        return Probe(tiny_model(), TrainingTask(get_batch, "{}", folder), replace(CFG, **changes)).estimate()

    return probed


def test_a_probe_counts_what_a_step_learns_from(probed, tiny_model, make_batch):
    batches = [make_batch(i) for i in range(40)]
    once, twice = probed(make_batch), probed(make_batch, gradient_accumulation_steps=2, max_steps=20)
    assert once.parameters == once.trained == sum(p.numel() for p in tiny_model().parameters())
    assert once.tokens == round(sum(batch["input_ids"].numel() for batch in batches) / 40)
    assert once.answer_tokens == round(sum(int((batch["targets"] != -100).sum()) for batch in batches) / 40)
    assert twice.tokens == pytest.approx(2 * once.tokens, abs=1) and (once.steps, twice.steps) == (40, 20)
    assert once.probed_steps == PROBED_STEPS and probed(make_batch, max_steps=2).probed_steps == 2
    assert once.seconds >= 30 * once.seconds_per_step > 0
    assert once.peak == int(once.measured_peak * (1 + MARGIN))


def test_adapters_and_frozen_parts_are_not_counted_as_trained(probed, make_batch):
    estimate = probed(make_batch, lora_rank=2, train_embeddings=False, vision_lr_scale=0.0)
    assert 0 < estimate.trained < estimate.parameters / 2


def test_the_largest_batch_of_the_run_is_probed(probed, make_batch):
    """By tokens and by images, in the place of others; each other step learns from its own batch."""
    read = []

    def get_batch(i):
        read.append(i)
        return make_batch(i, (60, 50) if i == 30 else (9, 6))

    probed(get_batch)
    assert read[:40] == list(range(40))
    assert read[40:] == [0, 30, *read[42:43], *range(3, PROBED_STEPS)]


def test_a_probe_publishes_nothing(tiny_model, make_batch, tmp_path):
    uploaded = []
    task = TrainingTask(make_batch, "{}", tmp_path / "probe", after_save=uploaded.append)
    Probe(tiny_model(), task, replace(CFG, report_to="wandb", tensorboard=True)).estimate()
    assert not uploaded and not (tmp_path / "probe" / "tensorboard").exists()


def test_an_estimate_leaves_nothing_on_disk(tiny_model, make_batch):
    folders = []

    def make(folder):
        folders.append(folder)
        return Probe(tiny_model(), TrainingTask(make_batch, "{}", folder), CFG)

    with log_lines() as lines:
        assert estimate_run(make).steps == 40
    assert len(lines) == 1 and "if the process is killed, memory has run out: lower --batch-size" in lines[0]
    assert folders[0].name == "out" and not folders[0].parent.exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee"), "not enough memory; lower"),
        (RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 9 bytes."), "not enough memory"),
        (MemoryError(), "not enough memory; lower --batch-size"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), r"\(pid 7\) .*--num-workers 0"),
    ],
    ids=["cuda", "cpu", "python", "worker"],
)
def test_running_out_of_memory_is_one_line_with_a_remedy(error, message):
    with pytest.raises(TrainingError, match=message) as caught, memory_errors():
        raise error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("a bug"), TrainingError("diverged")])
def test_any_other_error_stays_as_it_is(error):
    with pytest.raises(type(error)) as caught, memory_errors():
        raise error
    assert caught.value is error


# ------------------------------------------------------------------------------------------------- against real runs

VARIANTS = {
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    "adapters": ["--lora-rank", "8"],
    "checkpointing": ["--gradient-checkpointing"],
    "validation": ["--validation", "2", "--metric", "exact_match", "--validate-every", "10"],
}
# Peak memory at the end of training. While a process exits, torch's libraries page in 100 MiB more of their files.
PROGRAM = """
import sys, torch
from nanovlm.cli.main import run_verb
from nanovlm.device import peak_memory
code = run_verb("train", sys.argv[1:])
print("peak", peak_memory(torch.device("cpu")))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The embedded model, and a random one of nanoVLM's 222M shape, by their names."""
    from eval.lib.random_model import write_random_model
    from eval.lib.shapes import SHAPES

    large = tmp_path_factory.mktemp("222M")
    write_random_model(large, SHAPES["222M"][0])
    return {"embedded": EMBEDDED, "222M": large}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory differs elsewhere")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", ["embedded", "222M"])
def test_a_run_needs_what_its_plan_says_and_at_most_10_percent_less(tmp_path, models, shape, variant):
    (data := tmp_path / "data").mkdir()
    for i in range(40):
        scene = random_scene(random.Random(i))
        draw(scene, 96, 96).save(data / f"{i}.png")
        (data / f"{i}.txt").write_text(caption(scene))

    def run(*more):
        flags = ["--data", data, "--model", models[shape], "--max-steps", "30", "--device", "cpu", *VARIANTS[variant]]
        flags += ["--batch-size", "8" if shape == "embedded" else "1", "--lr", "1e-5", *more]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, *map(str, flags)]
        return subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout

    plan = int(re.search(r"peak memory ([\d,]+) MiB", run("--dry-run"))[1].replace(",", ""))
    peak = int(re.search(r"peak (\d+)", run("--out", "out"))[1]) / 2**20
    print(f"{shape} {variant}: plan {plan} MiB, peak {peak:.0f} MiB, ratio {plan / peak:.3f}")
    assert peak <= plan <= 1.1 * peak
