"""Metrics of a training run: progress lines, metrics.jsonl, curves for wandb and trackio."""

import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.common import files
from nanovlm.console import count
from nanovlm.device import peak_memory
from nanovlm.errors import MissingExtraError, TrainingError
from nanovlm.evaluation import Evaluation, in_words
from nanovlm.evaluation.metrics import for_json
from nanovlm.evaluation.report import write_report
from nanovlm.training.checkpointing import write_errors
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import DistributedContext

METRICS_FILE = "metrics.jsonl"
REPORT = "report.html"
SHOWN_ANSWERS = 2  # to held-out questions, at each evaluation
FIRST_STEPS = 5  # after them a line says what the run needs
LOSS = "loss"  # lower is better; of every other metric, higher is

logger = logging.getLogger(__name__)


class MetricsLogger:
    """Writes the metrics of a run in `folder` that starts, or is resumed, after `first_step` steps.

    A line of metrics.jsonl is an object with "step" and either that step's loss, lr, grad_norm, tokens_per_s and memory
    (bytes), or what an evaluation after it measured: validation_loss and other scores with that prefix, or answers.
    Only the main process writes. `clock` returns seconds.
    """

    def __init__(
        self,
        folder: Path,
        cfg: TrainConfig,
        first_step: int,
        context: DistributedContext,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.path = folder / METRICS_FILE
        self.cfg = cfg
        self.first_step = first_step
        self.context = context
        self.clock = clock
        self.tracker: Any = None
        if context.is_main:
            with write_errors(folder):
                truncate(self.path, first_step)
            if cfg.report_to != "none":
                self.tracker = start_tracker(cfg, folder, first_step > 0)
        self.last = clock()  # when the last step or evaluation ended
        self.evaluation_seconds = 0.0  # of the last one
        self.steps: list[tuple[float, int, float]] = []  # loss, tokens and seconds of each, checkpoints included

    def log_step(self, step: int, loss: float, lr: float, grad_norm: float, tokens: int) -> None:
        """Write the metrics of a step; log a line every cfg.log_every steps, and once what the run needs.

        loss is the mean over the answer tokens, grad_norm is before clipping, tokens are without padding.
        """
        if not self.context.is_main:
            return
        seconds = self._lap()
        memory = peak_memory(self.context.device)
        speed = round(tokens / seconds, 1)
        self._write(step, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=speed, memory=memory)
        self.steps.append((loss, tokens, seconds))
        steps_left = self.cfg.max_steps - step
        pace = sum(lap for _, _, lap in self.steps[1:]) / max(1, len(self.steps) - 1)  # the first step warms up
        left = steps_left * pace + math.ceil(steps_left / self.cfg.interval) * self.evaluation_seconds
        needs = f"{f'{memory / 2**20:,.0f}' if memory else '?'} MiB, {pace:.2f} s/step, about {left / 60:,.0f} min left"
        if step - self.first_step == FIRST_STEPS:
            logger.info(f"after {FIRST_STEPS} steps: peak memory {needs}; Ctrl-C ends with the best model so far")
        if step % self.cfg.log_every == 0 or steps_left == 0:
            since_last = step % self.cfg.log_every or self.cfg.log_every
            losses, counts, laps = zip(*self.steps[-since_last:])
            progress = f"step {step}/{self.cfg.max_steps}: loss {sum(losses) / len(losses):.4f}, lr {lr:.1e}"
            logger.info(f"{progress}, {sum(counts) / sum(laps):,.0f} tokens/s, {needs}")

    def log_evaluation(self, step: int, loss: float | None, evaluation: Evaluation | None) -> None:
        """Write what an evaluation after `step` steps measured on held-out examples."""
        if not self.context.is_main:
            return
        self.evaluation_seconds = self._lap()
        values = {} if loss is None else {"loss": loss}
        values |= evaluation.scores if evaluation else {}
        if values:
            self._write(step, **{f"validation_{name}": value for name, value in values.items()})
            logger.info(f"step {step}/{self.cfg.max_steps}: held out: {in_words(values)}")
        shown = evaluation.answers[:SHOWN_ANSWERS] if evaluation else ()
        if shown:
            self._write(step, answers=[answer.text for answer in shown])
        for answer in shown:
            logger.info(f"  answer: {answer.text}  (reference: {answer.question.references[0]})")

    def _lap(self) -> float:
        before = self.last
        self.last = self.clock()
        return self.last - before

    def _write(self, step: int, **values: Any) -> None:
        values = for_json(values)  # a gradient norm may overflow in float16
        numbers = {name: value for name, value in values.items() if isinstance(value, float | int)}
        if self.tracker and numbers:
            self.tracker.log(numbers, step=step)
        line = json.dumps({"step": step} | values) + "\n"
        with write_errors(self.path.parent):
            files.append(self.path, line.encode())

    def close(self) -> None:
        if self.tracker:
            self.tracker.finish()


def check_installed(cfg: TrainConfig) -> None:
    """Raise MissingExtraError if the run is to be logged by a package that is not installed."""
    if cfg.report_to != "none" and importlib.util.find_spec(cfg.report_to) is None:
        raise MissingExtraError(f"the run is to be logged by {cfg.report_to}: pip install 'nanovlm[track]'")


def start_tracker(cfg: TrainConfig, folder: Path, resumed: bool = False) -> Any:
    """Start a run of wandb or trackio, offline unless their environment says otherwise; a resumed run keeps its id."""
    module = importlib.import_module(cfg.report_to)
    options: dict[str, Any] = {"resume": "allow" if resumed else "never"}
    if cfg.report_to == "wandb":
        options |= {"dir": str(folder), "mode": os.environ.get("WANDB_MODE", "offline")}
        if options["mode"] == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its reports of crashes go to sentry.io
        earlier = sorted(folder.glob("wandb/*run-*")) if resumed else []  # offline-run-TIME-ID, and run-TIME-ID
        if earlier:
            options["id"] = max(earlier, key=lambda path: path.name.split("-")[-2]).name.rpartition("-")[2]
    module.init(project="nanovlm", name=folder.name, config=asdict(cfg), **options)
    return module


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl, without a last line that a killed run left unfinished; [] without the file."""
    try:
        lines = files.read_text(path, limit=None).split("\n") if path.exists() else [""]
        return [json.loads(line) for line in lines[:-1]]
    except (OSError, ValueError, RecursionError) as error:
        raise TrainingError(f"{path} cannot be read: {error}; move it away") from None


def truncate(path: Path, step: int) -> None:
    """Remove the lines that were written after `step` steps, which are about to be repeated; create a missing file."""
    entries = [entry for entry in read_metrics(path) if entry["step"] <= step]
    files.replace(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def report_run(folder: Path, answers: Evaluation, metric: str, best: int) -> None:
    """Log the scores of the final model's answers, and write report.html; the step `best` is marked in its curves."""
    asked = count(len(answers.answers), "held-out question")
    fact = f"the final model's answers to {asked}: {in_words(answers.scores, len(answers.answers))}"
    logger.info(fact)
    if answers.skipped:
        logger.warning(f"{count(len(answers.skipped), 'question')} could not be asked, the first: {answers.skipped[0]}")
    if advice := answers.advice():
        logger.warning(advice)
    write_report(folder / REPORT, str(folder), answers, metric, read_metrics(folder / METRICS_FILE), [fact], best)
