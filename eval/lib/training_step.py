"""Seconds of a training step: of train.py's loop, and of nanoVLM's own.

A batch has 8 rows of an image and 128 tokens, half of them answers. nanoVLM's train.py is autocast, logits of all
positions, AdamW, one gradient norm.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from eval.lib.command import measure_seconds, synchronize
from models.vision_language_model import VisionLanguageModel
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import Trainer, TrainingTask

ROWS = 8
TEXT = 128  # tokens of a row, behind its image
WARMUP = 3
STEPS = 10  # that are measured


def make_batch(model: VisionLanguageModel) -> dict[str, Tensor]:
    """Rows of an image and random text: ids, mask and targets (rows, T), and images (rows, 3, S, S)."""
    cfg = model.cfg
    image = torch.full((ROWS, cfg.mp_image_token_length), model.image_token_id)
    words = torch.randint(1, cfg.lm_vocab_size - 1, (ROWS, TEXT))
    words += words == model.image_token_id
    ids = torch.cat([image, words], 1)
    targets = ids.roll(-1, 1)
    targets[:, : cfg.mp_image_token_length + TEXT // 2] = -100
    images = torch.rand(ROWS, 3, cfg.vit_img_size, cfg.vit_img_size)
    return {"input_ids": ids, "images": images, "attention_mask": torch.ones_like(ids), "targets": targets}


def own_step(model: VisionLanguageModel, dtype: str) -> float:
    """Median seconds of a step of train.py's loop, which changes the model."""
    batch = make_batch(model)
    times: list[float] = []

    def get_batch(number: int) -> dict[str, Tensor]:
        synchronize(model.device)
        times.append(time.perf_counter())
        return batch

    steps = WARMUP + STEPS + 1
    cfg = TrainConfig(max_steps=steps, save_every=10 * steps, num_workers=0, dtype=dtype)
    with TemporaryDirectory() as folder:
        Trainer(model, TrainingTask(get_batch, "{}", Path(folder)), cfg).run()
    return median(after - before for before, after in zip(times[WARMUP:], times[WARMUP + 1 :]))


def stock_step(model: VisionLanguageModel, dtype: str) -> float:
    """Median seconds of a step of nanoVLM's loop, which changes the model."""
    batch = {name: tensor.to(model.device) for name, tensor in make_batch(model).items()}
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

    def step() -> None:
        with torch.autocast(model.device.type, getattr(torch, dtype), enabled=dtype != "float32"):
            loss = model(**batch)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return median([measure_seconds(step, model.device) for _ in range(WARMUP + STEPS)][WARMUP:])


LOOPS: dict[str, Callable[[VisionLanguageModel, str], float]] = {"nanoVLM's loop": stock_step, "train.py": own_step}
