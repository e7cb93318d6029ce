"""This project's fine-tuning beside another's, step by step in turns: loss against time, tokens/s, exact answers."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol

from eval.lib.tables import table
from eval.lib.training_setup import TrainingSetup, batches_of
from eval.peers.training_peers import NanoVLMRun, TrlRun
from nanovlm.data import Batches
from nanovlm.training.loader import Batch
from nanovlm.training.loop import Trainer
from nanovlm.training.optimizer import accelerated

OURS = "this project"
PEERS = ("nanovlm", "trl")
PROBED_STEPS = 4  # whose median says how many steps fit into the minutes
POINTS = 5  # of the loss curve


class TrainingRun(Protocol):
    """A run of a fixed number of steps."""

    def step(self) -> float: ...

    def save(self) -> Path: ...


class OurRun:
    """The training loop of `train.py --data`."""

    def __init__(self, trainer: Trainer, stack: ExitStack):
        stack.enter_context(accelerated(trainer.model, trainer.cfg))
        self.trainer = trainer
        self.batches: Iterator[Batch] = stack.enter_context(batches_of(trainer))
        self.steps = 0

    def step(self) -> float:
        self.steps += 1
        return self.trainer.training_step(self.steps - 1, self.batches).loss

    def save(self) -> Path:
        self.trainer.write_results(self.trainer.model.eval())
        return self.trainer.task.folder


@dataclass
class RaceResult:
    """Seconds and loss of each step of a run, and the share of exact answers afterwards."""

    name: str
    tokens_per_step: float
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    exact: float | None = None

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """From the median step after the first, which warms up."""
        return self.tokens_per_step / median(self.seconds[1:] or self.seconds)

    def loss_until(self, second: float, since: float) -> float | None:
        """Mean loss of the steps that ended between two times; None if there are none."""
        ends, total = [], 0.0
        for seconds, loss in zip(self.seconds, self.losses):
            total += seconds
            if since < total <= second:
                ends.append(loss)
        return mean(ends) if ends else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class Race:
    """The runs of a race, made again for each number of steps."""

    setup: TrainingSetup
    peer: str
    folder: Path
    checkout: Path | None  # of upstream nanoVLM

    def start(self, name: str, max_steps: int, stack: ExitStack) -> TrainingRun:
        """A run of max_steps steps; its files go to a folder of their own."""
        folder = self.folder / f"{name.replace(' ', '-')}-{max_steps}"
        if name == OURS:
            return OurRun(self.setup.trainer(folder, max_steps), stack)
        trainer = self.setup.trainer(self.folder / "settings", max_steps)
        batches, lr = trainer.task.get_batch, trainer.cfg.lr
        assert isinstance(batches, Batches)
        if name == "trl":
            return TrlRun(self.setup, folder, lr, max_steps)
        assert self.checkout is not None
        return NanoVLMRun(self.setup, folder, batches, lr, max_steps, self.checkout)

    def tokens_per_step(self) -> float:
        batches = self.setup.trainer(self.folder / "settings", 1).task.get_batch
        assert isinstance(batches, Batches)
        return mean(len(batches.row(i).ids) for i in range(32)) * self.setup.batch_size

    def run(self, steps: int | None, seconds: float, measure: Callable[[Path], float] | None) -> list[RaceResult]:
        """Run both, the one that has used less time next: `steps` steps each, or as many as take `seconds`."""
        tokens = self.tokens_per_step()
        names = (OURS, self.peer)
        planned = {name: steps or self._steps_in(name, seconds) for name in names}
        results = {name: RaceResult(name, tokens) for name in names}
        with ExitStack() as stack:
            runs = {name: self.start(name, planned[name], stack) for name in names}
            while waiting := [name for name in names if len(results[name].seconds) < planned[name]]:
                take_step(runs, min((results[name] for name in waiting), key=lambda result: result.total_s))
            if measure:
                for name, run in runs.items():
                    results[name].exact = measure(run.save())
        return [results[name] for name in names]

    def _steps_in(self, name: str, seconds: float) -> int:
        with ExitStack() as stack:
            runs, result = {name: self.start(name, PROBED_STEPS, stack)}, RaceResult(name, 1)
            for _ in range(PROBED_STEPS):
                take_step(runs, result)
        return max(2, round(seconds / median(result.seconds[1:])))


def take_step(runs: dict[str, TrainingRun], result: RaceResult) -> None:
    """Let result's run take a step, and add its seconds and loss."""
    started = time.perf_counter()
    result.losses.append(runs[result.name].step())
    result.seconds.append(time.perf_counter() - started)


def race_table(results: list[RaceResult]) -> str:
    """Speed, loss in each fifth of the time, and exact answers, a column for each run."""
    slowest = max(result.total_s for result in results)
    rows = [["", *(result.name for result in results)], ["steps", *(str(len(result.seconds)) for result in results)]]
    rows.append(["seconds", *(f"{result.total_s:.1f}" for result in results)])
    rows.append(["tokens/s", *(f"{result.tokens_per_s:,.0f}" for result in results)])
    for point in range(POINTS if len(results[0].losses) > 2 * POINTS else 0):
        since, until = slowest * point / POINTS, slowest * (point + 1) / POINTS
        losses = [result.loss_until(until, since) for result in results]
        texts = ["-" if loss is None else f"{loss:.3f}" for loss in losses]
        rows.append([f"loss, {since:.0f} to {until:.0f} s", *texts])
    if results[0].exact is not None:
        rows.append(["exact captions", *(f"{result.exact:.1%}" for result in results)])
    return table(rows)
