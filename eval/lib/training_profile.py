"""Where the time of a training step goes: hooks at the borders of the model's parts measure each stage."""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eval.lib.command import table
from eval.lib.hardware import count_flops, matmul_flops
from eval.lib.training_race import TrainingSetup, started
from nanovlm.device import choose_training_dtype
from nanovlm.training.loader import Batch
from nanovlm.training.loop import Trainer

STAGES = (
    "data", "vision forward", "projector forward", "language model forward", "head and loss forward",
    "head and loss backward", "language model backward", "projector backward", "vision backward",
    "gradient clipping", "optimizer", "other",
)  # fmt: skip


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
        self.mark("other")
        for batch in batches:
            self.mark("data")
            yield batch
            self.mark("other")


def profile_training(setup: TrainingSetup, folder: Path, steps: int) -> tuple[dict[str, float], str]:
    """Median seconds of each stage of `steps` training steps after one whose operations are counted, and the table.

    The run's files go to folder.
    """
    trainer, timer = setup.trainer(folder, steps + 1), StageTimer()
    stages: list[dict[str, float]] = []
    tokens = []
    timer.attach(trainer)
    with started(trainer) as batches, torch.enable_grad():
        timed = timer.timed_batches(batches)
        with count_flops() as counter:
            first = trainer.training_step(0, timed)  # which also warms up
        for step in range(1, steps + 1):
            timer.reset()
            tokens.append(trainer.training_step(step, timed).tokens)
            timer.mark("other")
            stages.append(timer.seconds)
    medians = {name: median(s[name] for s in stages) for name in STAGES}
    step_s = median(sum(s.values()) for s in stages)
    rows = [["stage", "seconds", "share"]]
    rows += [[name, f"{s:.3f}", f"{s / step_s:.1%}"] for name, s in medians.items()]
    rows.append(["step", f"{step_s:.3f}", "100.0%"])
    rate = median(n / sum(s.values()) for n, s in zip(tokens, stages))
    flops = rate * counter.get_total_flops() / first.tokens
    share = flops / matmul_flops(choose_training_dtype(setup.dtype, trainer.model.device))
    parameters = sum(p.numel() for p in trainer.model.parameters())
    text = f"{rate:,.0f} tokens/s, {parameters:,} parameters"
    text += f"\n{flops / 1e9:,.0f} GFLOP/s, {share:.0%} of this machine's in a matmul alone"
    return medians | {"step": step_s, "share_of_peak": share}, f"{table(rows)}\n{text}"
