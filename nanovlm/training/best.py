"""Which evaluation of a run was the best, and whether later ones still improve."""

import math
from pathlib import Path

from nanovlm.training.checkpointing import checkpoint_path
from nanovlm.training.metrics import METRICS, read_metrics

LOSS = "loss"  # lower is better; of every other metric, higher is


class BestTracker:
    """The values of one metric at the evaluations of a run, read from folder/metrics.jsonl up to first_step.

    The evaluation before the first step is `start`, and no candidate. If the checkpoint of the best one is kept, an
    evaluation better than all whose checkpoints are still there is forgotten.
    """

    def __init__(self, folder: Path, name: str, first_step: int, kept: bool = True):
        self.name, self.key = name, f"validation_{name}"
        self.values: dict[int, float] = {}  # by step
        self.start: float | None = None
        for entry in read_metrics(folder / METRICS):
            if entry["step"] <= first_step and entry.get(self.key) is not None:
                self.add(entry["step"], entry[self.key])
        while kept and self.step is not None and not checkpoint_path(folder, self.step).is_dir():
            del self.values[self.step]

    def add(self, step: int, value: float | None) -> bool:
        """Record the evaluation after `step` steps; whether it is the best so far."""
        value = math.nan if value is None else value
        if step == 0:
            self.start = value
            return False
        self.values[step] = value
        return self.step == step

    @property
    def step(self) -> int | None:
        """The step of the best evaluation, the first of equals; None before any."""
        return min(
            (step for step, value in self.values.items() if not math.isnan(value)),
            key=lambda step: (self._cost(self.values[step]), step),
            default=None,
        )

    @property
    def value(self) -> float | None:
        return None if self.step is None else self.values[self.step]

    @property
    def evaluations_since(self) -> int:
        """How many evaluations followed the best one."""
        return sum(step > (self.step or 0) for step in self.values)

    @property
    def improved(self) -> bool:
        """Whether the best evaluation is better than the one before the first step, if there was one."""
        if self.value is None or self.start is None or math.isnan(self.start):
            return True
        return self._cost(self.value) < self._cost(self.start)

    def _cost(self, value: float) -> float:
        return value if self.name == LOSS else -value
