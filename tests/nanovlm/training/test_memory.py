"""The estimate of memory, against the counted memory of a real step and against what the system measures."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch

from nanovlm.errors import TrainingError
from nanovlm.training.config import TrainConfig
from nanovlm.training.memory import MALLOC_OVERHEAD, LiveMemory, estimate_memory, memory_errors
from nanovlm.training.optimizer import accelerated, freeze
from support import ROOT

CFG = TrainConfig(max_steps=9, num_workers=0, dtype="float32")
VARIANTS = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "accumulation": {"gradient_accumulation_steps": 3},
    "frozen encoder": {"vision_rate": 0.0},
    "adapters": {"lora_rank": 2},
    "adapters alone": {"lora_rank": 2, "lora_words": False},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def estimate(tiny_model, make_batch):
    """The estimate for a tiny model with changed settings; made once for several tests."""

    @cache
    def estimate(**changes):
        return estimate_memory(tiny_model(lm_dropout=0.1), make_batch, replace(CFG, **changes))

    return estimate


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rehearsed_step_needs_what_a_real_step_needs(tiny_model, make_batch, estimate, variant):
    cfg, model, batch = replace(CFG, **VARIANTS[variant]), tiny_model(lm_dropout=0.1).train(), make_batch(0)
    freeze(model, cfg)
    dtype = torch.bfloat16 if variant == "bfloat16" else torch.float32
    with LiveMemory(len(batch["images"]) * 4) as memory, accelerated(model, cfg):
        for p in model.parameters():
            memory.ignore(p)
        for _ in range(cfg.gradient_accumulation_steps):
            with torch.autocast("cpu", dtype, enabled=variant == "bfloat16"):
                _, loss = model(**batch)
            loss.backward()
    estimated = estimate(**VARIANTS[variant])
    batch_bytes = sum(tensor.nbytes for tensor in batch.values()) * cfg.gradient_accumulation_steps
    assert (estimated.step - batch_bytes) / (1 + MALLOC_OVERHEAD) == pytest.approx(memory.peak, rel=0.02)
    learning = [p for p in model.parameters() if p.requires_grad]
    assert estimated.parameters == sum(p.numel() for p in model.parameters())
    assert estimated.trained == sum(p.numel() for p in learning) and estimated.moments == 8 * estimated.trained
    assert estimated.weights == 4 * estimated.parameters
    assert estimated.tokens == batch["input_ids"].numel() * cfg.gradient_accumulation_steps
    assert estimated.answer_tokens == int((batch["targets"] != -100).sum()) * cfg.gradient_accumulation_steps


def test_the_estimate_sees_what_saves_memory(estimate):
    plain = estimate()
    assert estimate(gradient_checkpointing=True).step < plain.step
    assert estimate(vision_rate=0.0).step < plain.step and estimate(vision_rate=0.0).moments < plain.moments
    assert estimate(lora_rank=2, lora_words=False).moments < estimate(lora_rank=2).moments
    assert estimate(lora_rank=2).peak - estimate(lora_rank=2).process < plain.peak - plain.process


def test_the_largest_of_the_first_batches_counts(tiny_model, make_batch):
    estimated = estimate_memory(tiny_model(), lambda i: make_batch(i, (40 if i == 5 else 9, 6)), CFG)
    assert estimated.tokens == 2 * 48


def test_an_estimate_is_one_line_and_leaves_the_model_as_it_was(tiny_model, make_batch):
    model = tiny_model()
    estimate = estimate_memory(model, make_batch, replace(CFG, lora_rank=2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny_model().parameters(), strict=True))
    line = str(estimate)
    assert line.startswith(f"{estimate.parameters:,} parameters, {estimate.trained:,} of them trained")
    assert "peak memory about" in line and "\n" not in line


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


PROGRAM = """
import json, sys, torch
from support import TINY
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm.data.examples import EncodedExample, collate
from nanovlm.device import peak_memory
from nanovlm.training.memory import estimate_memory
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import train

settings = json.loads(sys.argv[2])
rows = settings.pop("rows")
shape = {"vit_hidden_dim": 128, "vit_inter_dim": 512, "vit_n_heads": 4, "vit_n_blocks": 4, "vit_patch_size": 8,
         "vit_img_size": 64, "max_img_size": 64, "mp_image_token_length": 16, "lm_hidden_dim": 384,
         "lm_inter_dim": 1024, "lm_n_blocks": 8, "lm_vocab_size": 8000, "lm_max_position_embeddings": 1024}

def batch(i):
    draw, made = torch.Generator().manual_seed(i), []
    for _ in range(rows):
        ids = [3] * 16 + torch.randint(4, 8000, (200,), generator=draw).tolist()
        images = [torch.rand(1, 3, 64, 64, generator=draw)]
        made.append(EncodedExample(ids, [-100] * 20 + ids[21:] + [5], [1] * 216, images))
    return collate(made)

torch.manual_seed(0)
model = VisionLanguageModel(VLMConfig(**TINY | shape), 3)
cfg = TrainConfig(**{"max_steps": 3, "num_workers": 0, "log_every": 1} | settings)
estimated = estimate_memory(model, batch, cfg).peak
train(model, "{}", batch, cfg, sys.argv[1])
print(json.dumps([estimated, peak_memory(model.device)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read on Linux only")
@pytest.mark.parametrize(
    "settings",
    [{"rows": 8, "dtype": "float32"}, {"rows": 8}, {"rows": 24, "gradient_checkpointing": True},
     {"rows": 8, "lora_rank": 8, "gradient_accumulation_steps": 2}],
    ids=str,
)  # fmt: skip
def test_the_estimate_is_within_15_percent_of_what_is_measured(tmp_path, settings):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(settings)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    estimated, measured = json.loads(out)
    assert estimated == pytest.approx(measured, rel=0.15)
