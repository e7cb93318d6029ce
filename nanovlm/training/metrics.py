"""Metrics of a training run: progress lines, metrics.jsonl, curves for wandb and trackio, the best evaluation."""

import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.checkpoint import atomic_write
from nanovlm.console import count
from nanovlm.data.jsonl import read_jsonl
from nanovlm.device import peak_memory
from nanovlm.errors import MissingExtraError
from nanovlm.evaluation import Evaluation
from nanovlm.evaluation.report import write_report
from nanovlm.training.checkpointing import checkpoint_path, write_errors
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import DistributedContext

METRICS, REPORT = "metrics.jsonl", "report.html"
SHOWN_ANSWERS = 4  # to held-out questions, at each evaluation
FIRST_STEPS = 5  # after them a line says what the run needs
LOSS = "loss"  # lower is better; of every other metric, higher is

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step measured, over all processes."""

    step: int  # steps done, this one included
    loss: float  # mean over the answer tokens
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # read, without padding


class MetricsLogger:
    """Writes the metrics of a run in `folder` that starts, or is resumed, after `first_step` steps.

    A line of metrics.jsonl is an object with "step" and either that step's loss, lr, grad_norm, tokens_per_s and memory
    (bytes), or what an evaluation after it measured: validation_loss and other scores with that prefix, or answers.
    Only the main process writes.
    `clock` returns seconds.
    """

    def __init__(
        self,
        folder: Path,
        cfg: TrainConfig,
        first_step: int,
        context: DistributedContext,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.path, self.cfg, self.first_step = folder / METRICS, cfg, first_step
        self.context, self.clock = context, clock
        self.tracker: Any = None
        if context.is_main:
            with write_errors(folder):
                truncate(self.path, first_step)
            if cfg.report_to != "none":
                self.tracker = start_tracker(cfg, folder, first_step > 0)
        self.start_time = self.step_start = self.evaluation_start = clock()
        self.evaluation_seconds = 0.0  # of the last one
        self.pace_seconds = 0.0  # of the first steps but the very first, which warms up
        self.losses: list[float] = []  # since the last progress line
        self.tokens = 0  # since start_time

    def start_step(self) -> None:
        self.step_start = self.clock()

    def log_step(self, metrics: StepMetrics) -> None:
        """Write the metrics of a step; a progress line every cfg.log_every steps, and once what the run needs."""
        seconds, memory = self.clock() - self.step_start, peak_memory(self.context.device)
        values = asdict(metrics) | {"tokens_per_s": round(metrics.tokens / seconds, 1), "memory": memory}
        del values["tokens"]
        self._write(**values)
        self.losses.append(metrics.loss)
        self.tokens += metrics.tokens
        if metrics.step % self.cfg.log_every == 0 or metrics.step == self.cfg.max_steps:
            self._log(self._progress(metrics, memory))
            self.losses.clear()
        n_done = metrics.step - self.first_step
        self.pace_seconds += seconds if 1 < n_done <= FIRST_STEPS else 0
        if n_done == FIRST_STEPS:
            self._log(self._needs(metrics.step, memory))
        self.evaluation_start = self.clock()

    def _progress(self, metrics: StepMetrics, memory: int) -> str:
        """The progress line; its pace is the mean since the start, evaluations and checkpoints included."""
        step, max_steps = metrics.step, self.cfg.max_steps
        elapsed = self.clock() - self.start_time
        seconds_per_step = elapsed / (step - self.first_step)
        return (
            f"step {step}/{max_steps}  loss {sum(self.losses) / len(self.losses):.4f}  lr {metrics.lr:.1e}  "
            f"{seconds_per_step:.2f} s/step  {self.tokens / elapsed:,.0f} tokens/s  "
            f"{memory / 2**20:,.0f} MiB  {(max_steps - step) * seconds_per_step / 60:.0f} min left"
        )

    def _needs(self, step: int, memory: int) -> str:
        """What the run needs, as far as its first steps and the last evaluation tell."""
        pace, steps_left = self.pace_seconds / (FIRST_STEPS - 1), self.cfg.max_steps - step
        evaluations_left = math.ceil(steps_left / self.cfg.evaluation_interval)
        seconds = steps_left * pace + evaluations_left * self.evaluation_seconds
        return (
            f"after {FIRST_STEPS} steps: peak memory {memory / 2**20:,.0f} MiB, {pace:.2f} s/step, "
            f"about {seconds / 60:,.0f} min left"
        )

    def log_evaluation(self, step: int, validation_loss: float | None, evaluation: Evaluation | None) -> None:
        """Write what an evaluation after `step` steps measured on held-out examples."""
        self.evaluation_seconds = self.clock() - self.evaluation_start
        values = {} if validation_loss is None else {"loss": validation_loss}
        values |= evaluation.scores if evaluation else {}
        if values:
            self._write(step, **{f"validation_{name}": value for name, value in values.items()})
            self._log(f"step {step}/{self.cfg.max_steps}  validation {in_words(values)}")
        shown = evaluation.answers[:SHOWN_ANSWERS] if evaluation else ()
        if shown:
            self._write(step, answers=[answer.text for answer in shown])
        for answer in shown:
            wanted = answer.question.references[0]
            self._log(f"step {step}/{self.cfg.max_steps}  answer: {answer.text}  (reference: {wanted})")

    def _log(self, line: str) -> None:
        if self.context.is_main:
            logger.info(line)

    def _write(self, step: int, **values: Any) -> None:
        if not self.context.is_main:
            return
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None  # a gradient norm may overflow in float16, and JSON has no infinity
        if self.tracker:
            numbers = {name: value for name, value in values.items() if isinstance(value, float | int)}
            self.tracker.log(numbers, step=step)
        with write_errors(self.path.parent), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | values) + "\n")

    def close(self) -> None:
        if self.tracker:
            self.tracker.finish()


def check_installed(cfg: TrainConfig) -> None:
    """Raise MissingExtraError if the run is to be logged by a package that is not installed."""
    if cfg.report_to != "none" and importlib.util.find_spec(cfg.report_to) is None:
        raise MissingExtraError(f"the run is to be logged by {cfg.report_to}: pip install 'nanovlm[track]'")


def start_tracker(cfg: TrainConfig, folder: Path, resumed: bool = False) -> Any:
    """Start a run of wandb or trackio, which share an interface, and return the module; nothing leaves the machine.

    WANDB_MODE=online, and what trackio reads from its environment, say otherwise. A resumed run goes on under the id
    that it had.
    """
    module = importlib.import_module(cfg.report_to)
    options: dict[str, Any] = {"resume": "allow" if resumed else "never"}
    if cfg.report_to == "wandb":
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its reports of crashes go to sentry.io
        options |= {"dir": str(folder), "mode": mode}
        earlier = sorted(folder.glob("wandb/*run-*")) if resumed else []  # offline-run-TIME-ID, and run-TIME-ID
        if earlier:
            options["id"] = max(earlier, key=lambda path: path.name.split("-")[-2]).name.rpartition("-")[2]
    module.init(project="nanovlm", name=folder.name, config=asdict(cfg), **options)
    return module


def in_words(scores: Mapping[str, float]) -> str:
    """The scores by name, for a line."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl, without a last line that a killed run left unfinished; [] without the file."""
    return read_jsonl(path, torn_tail="drop") if path.exists() else []


def truncate(path: Path, step: int) -> None:
    """Remove the lines that were written after `step` steps, which are about to be repeated; create a missing file."""
    entries = [entry for entry in read_metrics(path) if entry["step"] <= step]
    with atomic_write(path) as new:
        new.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def report_run(folder: Path, answers: Evaluation, kept_step: int | None) -> None:
    """Log the scores of the final model's answers, and write report.html; kept_step is marked in its curves."""
    asked = count(len(answers.answers), "held-out question")
    fact = f"the final model's answers to {asked}: {in_words(answers.scores)}"
    logger.info(fact)
    if answers.skipped:
        logger.warning(f"{count(len(answers.skipped), 'question')} could not be asked, the first: {answers.skipped[0]}")
    if answers.scores.get("exact_match") == 0:
        logger.warning("no answer is exactly right: more --max-steps may be needed")
    write_report(folder / REPORT, str(folder), answers, read_metrics(folder / METRICS), [fact], kept_step)


class BestTracker:
    """The values of a metric at the evaluations of a run, read from folder/metrics.jsonl up to a step.

    The evaluation before the first step is `start`, and no candidate. If the checkpoint of the best one is kept, an
    evaluation better than all whose checkpoints are still there is forgotten.
    """

    def __init__(self, folder: Path, cfg: TrainConfig, metric: str, first_step: int):
        self.metric = metric
        self.values: dict[int, float] = {}  # by step
        self.start: float | None = None
        for entry in read_metrics(folder / METRICS):
            if entry["step"] <= first_step and (value := entry.get(f"validation_{metric}")) is not None:
                self.add(entry["step"], value)
        while cfg.keep_best and self.step is not None and not checkpoint_path(folder, self.step).is_dir():
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
        """The step of the best evaluation, the last of equals; None before any."""
        scores = {step: self._score(value) for step, value in self.values.items() if not math.isnan(value)}
        return max(scores, key=lambda step: (scores[step], step), default=None)

    @property
    def value(self) -> float | None:
        return None if self.step is None else self.values[self.step]

    @property
    def improved(self) -> bool:
        """Whether the best evaluation is better than the one before the first step, if there was one."""
        if self.value is None or self.start is None or math.isnan(self.start):
            return True
        return self._score(self.value) > self._score(self.start)

    def _score(self, value: float) -> float:
        return -value if self.metric == LOSS else value
