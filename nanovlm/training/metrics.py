"""What a run tells while it goes on: a progress line, every number in metrics.jsonl, and curves for TensorBoard."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nanovlm.device import peak_memory
from nanovlm.training.checkpointing import writing
from nanovlm.training.config import TrainConfig

METRICS = "metrics.jsonl"


class Journal:
    """Of a run in folder that goes on after `first` steps; lines for people go to log.

    A line of metrics.jsonl is an object with "step" and either what that step was like (loss, lr, grad_norm,
    tokens_per_s, memory in bytes) or what was found after it (validation_loss, captions). Of several processes that
    train together, one writes.
    """

    def __init__(
        self,
        folder: Path,
        cfg: TrainConfig,
        first: int,
        device: torch.device,
        log: Callable[[str], None],
        writes: bool = True,
    ):
        self.folder, self.cfg, self.first, self.device, self.log, self.writes = folder, cfg, first, device, log, writes
        self.board = None
        if writes:
            with writing(folder):
                cut(folder / METRICS, first)
        if writes and cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1)
        self.started = self.before = time.perf_counter()
        self.losses, self.read = [], 0

    def step(self, done: int, loss: float, lr: float, grad_norm: float, tokens: int) -> None:
        """A step is done, the `done`-th: its loss, rate and gradient norm, and how many tokens it read."""
        now, memory = time.perf_counter(), peak_memory(self.device)
        pace = tokens / (now - self.before)
        self.write(done, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=round(pace, 1), memory=memory)
        self.losses.append(loss)
        self.read += tokens
        if done % self.cfg.log_every == 0 or done == self.cfg.steps:
            each = (now - self.started) / (done - self.first)
            self.log(
                f"step {done}/{self.cfg.steps}  loss {sum(self.losses) / len(self.losses):.4f}  lr {lr:.1e}  "
                f"{each:.2f} s/step  {self.read / (now - self.started):,.0f} tokens/s  "
                f"{memory / 2**20:,.0f} MiB  {(self.cfg.steps - done) * each / 60:.0f} min left"
            )
            self.losses.clear()
        self.before = time.perf_counter()

    def found(self, done: int, validation_loss: float | None, captions: Sequence[str]) -> None:
        """What was found after `done` steps, on held-out examples."""
        if validation_loss is not None:
            self.write(done, validation_loss=validation_loss)
            self.log(f"step {done}/{self.cfg.steps}  validation loss {validation_loss:.4f}")
        if captions:
            self.write(done, captions=list(captions))
            for caption in captions:
                self.log(f"step {done}/{self.cfg.steps}  says: {caption}")
        self.before = time.perf_counter()

    def write(self, done: int, **numbers) -> None:
        if not self.writes:
            return
        for name, value in numbers.items():
            if isinstance(value, float) and not math.isfinite(value):
                numbers[name] = None  # float16 overflows now and then, and JSON knows no infinity
            elif self.board and isinstance(value, float | int):
                self.board.add_scalar(name, value, done)
        with writing(self.folder), open(self.folder / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": done} | numbers) + "\n")

    def close(self) -> None:
        if self.board:
            self.board.close()


def entries(path: Path) -> list[dict]:
    """The objects of a metrics.jsonl, up to a line that a killed run could not finish; none without the file."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def cut(path: Path, first: int) -> None:
    """Take out what was written after `first` steps, which are done again now; atomically. Without a file, make one."""
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(entry) + "\n" for entry in entries(path) if entry["step"] <= first), "utf-8")
    os.replace(new, path)
