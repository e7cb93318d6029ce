"""Where the time of a training step goes: hooks at the borders of the model's parts measure each stage."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eval.lib.tables import table
from eval.lib.training_setup import TrainingSetup, batches_of
from nanovlm.training.loader import Batch
from nanovlm.training.loop import Trainer
from nanovlm.training.optimizer import accelerated

STAGES = (
    "data",
    "vision forward",
    "projector forward",
    "language model forward",
    "head and loss forward",
    "head and loss backward",
    "language model backward",
    "projector backward",
    "vision backward",
    "gradient clipping",
    "optimizer",
    "other",
)


class StageTimer:
    """Adds up the seconds between events, each counted for the stage that the event ends."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.last = time.perf_counter()

    def mark(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self.last
        self.last = now

    def attach(self, trainer: Trainer) -> None:
        """Mark where each stage of the trainer's steps ends; `data` is for `timed_batches`."""
        model = trainer.model

        def ends(forward: str, backward: str) -> Any:
            """A forward hook: now `forward` ends, and when the output's gradient is known, so does `backward`."""

            def hook(module: Any, inputs: Any, output: Any) -> None:
                self.mark(forward)
                hidden: Tensor = output[0] if isinstance(output, tuple) else output
                if hidden.requires_grad:
                    hidden.register_hook(lambda gradient: self.mark(backward))

            return hook

        model.vision_encoder.register_forward_pre_hook(lambda *_: self.mark("other"))
        model.decoder.register_forward_pre_hook(lambda *_: self.mark("other"))
        model.vision_encoder.register_forward_hook(ends("vision forward", "projector backward"))
        model.MP.register_forward_hook(ends("projector forward", "language model backward"))
        model.decoder.register_forward_hook(ends("language model forward", "head and loss backward"))
        model.register_forward_hook(lambda *_: self.mark("head and loss forward"))
        for p in model.vision_encoder.patch_embedding.parameters():  # the last gradients of a backward pass
            p.register_post_accumulate_grad_hook(lambda _: self.mark("vision backward"))
        trainer.optimizer.register_step_pre_hook(lambda *_: self.mark("gradient clipping"))
        trainer.optimizer.register_step_post_hook(lambda *_: self.mark("optimizer"))

    def timed_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            self.mark("other")
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.mark("data")
            yield batch


@dataclass(frozen=True)
class TrainingProfile:
    """Median seconds of each stage of a step, and of the whole step."""

    stages: dict[str, float]
    step_s: float
    tokens_per_s: float
    parameters: int

    def __str__(self) -> str:
        rows = [["stage", "seconds", "share"]]
        rows += [[name, f"{s:.3f}", f"{s / self.step_s:.1%}"] for name, s in self.stages.items()]
        rows.append(["step", f"{self.step_s:.3f}", "100.0%"])
        return f"{table(rows)}\n{self.tokens_per_s:,.0f} tokens/s, {self.parameters:,} parameters"


def profile_training(setup: TrainingSetup, folder: Path, steps: int) -> TrainingProfile:
    """Profile `steps` training steps after one that warms up; the run's files go to folder."""
    trainer = setup.trainer(folder, steps + 1)
    stages: list[dict[str, float]] = []
    totals, rates = [], []
    timer = StageTimer()
    timer.attach(trainer)
    with accelerated(trainer.model, trainer.cfg), batches_of(trainer) as batches, torch.enable_grad():
        timed = timer.timed_batches(batches)
        for step in range(steps + 1):
            timer.reset()
            started = timer.last
            metrics = trainer.training_step(step, timed)
            timer.mark("other")
            stages.append(timer.seconds)
            totals.append(timer.last - started)
            rates.append(metrics.tokens / totals[-1])
    return TrainingProfile(
        {name: median(s[name] for s in stages[1:]) for name in STAGES},
        median(totals[1:]),
        median(rates[1:]),
        sum(p.numel() for p in trainer.model.parameters()),
    )
