"""The training loop.

Notable features:
- a batch is a pure function of its number, so that a resumed run equals an uninterrupted one bit for bit
- gradient accumulation weighted by answer tokens: cutting a batch into several changes nothing
- data parallelism under torchrun, bfloat16 and float16 autocast
- each checkpoint is scored on held-out examples, and the best one becomes the model, also of a run that is stopped
"""

import logging
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.checkpoint import atomic_dir
from models.lora import adapters, merge
from models.vision_language_model import VisionLanguageModel
from nanovlm.device import BusyMonitor, choose_training_dtype
from nanovlm.errors import TrainingError
from nanovlm.evaluation import Evaluation
from nanovlm.options import check_output_folder
from nanovlm.training import checkpointing
from nanovlm.training.backward import autocast, backward, count_answer_tokens, count_tokens, to_device
from nanovlm.training.checkpointing import Checkpoint, DamagedCheckpointError, checkpoint_path, write_errors
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.loader import Batch, TrainingInterrupted, catch_stop_signals, load_batches
from nanovlm.training.metrics import LOSS, REPORT, MetricsLogger, StepMetrics, report_run
from nanovlm.training.optimizer import accelerated, freeze, make_optimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingTask:
    """What a run learns from, and where its files go.

    get_batch(0), get_batch(1), ... must be a pure function of the number. validation(0), ... are held-out batches.
    answer_questions gives a model's scored answers to held-out questions: to some of them, or to all if True follows.
    data_fingerprint and n_held_out, a number, a share or a path, are kept for the run that resumes this one.
    """

    get_batch: Callable[[int], Batch]
    tokenizer: str  # the text of tokenizer.json
    folder: Path
    save_dtype: torch.dtype | None = None  # of the final model's weights; None keeps float32
    validation: Callable[[int], Batch] | None = None
    n_validation: int = 0  # batches
    answer_questions: Callable[[VisionLanguageModel, bool], Evaluation] | None = None
    metric: str = LOSS  # of these answers, or the loss: says which checkpoint is the best
    data_fingerprint: str | None = None
    n_held_out: float | str = 0
    base: str | None = None  # the model that adapters belong to
    prompt: str | None = None  # becomes the model's default prompt


class Trainer:
    """One training run: resumed from the newest of task.folder/checkpoints, or started.

    Under torchrun, an optimizer step learns from cfg.gradient_accumulation_steps batches on each process, and the main
    process writes the files.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        task: TrainingTask,
        cfg: TrainConfig,
        context: DistributedContext | None = None,
    ):
        self.model, self.task, self.cfg = model, task, cfg
        self.context = context or DistributedContext(model.device)
        self.dtype = choose_training_dtype(cfg.dtype, model.device)
        self.scaler = torch.amp.GradScaler(model.device.type, enabled=self.dtype == torch.float16)
        self.busy = BusyMonitor(torch.get_num_threads())
        freeze(model, cfg)
        if not checkpointing.checkpoint_steps(task.folder):  # those of a run that is resumed have their space
            check_output_folder(task.folder, checkpointing.disk_space(model, cfg.keep_checkpoints + 2))
        with write_errors(task.folder):  # before any work
            task.folder.mkdir(parents=True, exist_ok=True)
        self.context.claim(task.folder)
        if self.context.is_main:
            checkpointing.remove_leftovers(task.folder)
        self.step = 0  # steps done
        self.scores: dict[int, float] = {}  # by step: task.metric on the held-out examples
        self.streams: dict[str, Any] = {}  # where each stream of examples stands, see `load_batches`
        checkpoint = checkpointing.load_newest(task.folder, model)
        if checkpoint:
            checkpointing.restore_model(checkpoint, model)
        self.context.broadcast_weights(model)
        self.optimizer = make_optimizer(model, cfg)
        if checkpoint:
            self._resume(checkpoint)

    def run(self) -> VisionLanguageModel:
        """Train until cfg.max_steps, write the best model to task.folder and return it.

        The best is the checkpoint with the best score, the last of equals; without held-out examples the last one. The
        model returned is the same object; with cfg.lora_rank another, merged from the first, which is then of no use.
        SIGINT and SIGTERM end the run after a checkpoint, with the best model so far and TrainingInterrupted.
        TrainingError if the run diverges or files cannot be written.
        """
        with self.context.lock:
            stopped = self._train()
            best = self._restore_best()
            if self.context.is_main:
                self._write_results(best, stopped)
        if stopped:
            raise TrainingInterrupted(128 + stopped)
        return merge(self.model, consume=True) if adapters(self.model) else self.model

    def _train(self) -> int:
        """Train; the number of the signal that ended it early, or 0."""
        cfg, context, first = self.cfg, self.context, self.step
        with (
            accelerated(self.model, cfg),
            load_batches(self.task.get_batch, self._batch_numbers(), cfg.num_workers, self.streams) as batches,
            catch_stop_signals() as signals,
            closing(context),
            context.peer_errors(),
            closing(MetricsLogger(self.task.folder, cfg, first, context)) as metrics,
        ):
            while True:
                is_last = self.step >= cfg.max_steps
                (n_signals,) = context.sum(len(signals))
                is_due = is_last or self.step % cfg.interval == 0
                if is_due and (self.step > first or first == 0):
                    self._evaluate(metrics)
                if (is_due or n_signals) and self.step > first:
                    self.streams = context.merge(batches.state)
                    self.save()
                if is_last:
                    return 0
                if n_signals:
                    return signals[0] if signals else signal.SIGTERM
                metrics.log_step(self._training_step(batches))

    def _training_step(self, batches: Iterator[Batch]) -> StepMetrics:
        """Forward and backward passes, gradient clipping and a step of the optimizer; TrainingError if it diverges."""
        cfg, model, context = self.cfg, self.model, self.context
        model.train()
        torch.manual_seed(cfg.seed + self.step + (context.rank << 40))  # makes dropout a function of the step
        lr = cfg.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        inputs = [to_device(batch, model.device) for batch in islice(batches, cfg.gradient_accumulation_steps)]
        with self.busy.measure():
            loss = backward(model, inputs, self.dtype, self.scaler, context)
        if context.is_main and model.device.type == "cpu" and (note := self.busy.note()):
            logger.info(note)
        context.sum_gradients(model)
        loss, tokens = context.sum(loss, sum(count_tokens(batch) for batch in inputs))
        self.scaler.unscale_(self.optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm).item()
        self._check_finite(loss, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        return StepMetrics(self.step, loss, lr, grad_norm, int(tokens))

    @torch.no_grad()
    def _evaluate(self, metrics: MetricsLogger) -> None:
        """Measure loss and answers on held-out examples, and note the score of this step."""
        task, answers = self.task, None
        self.model.eval()
        loss = self.validation_loss() if task.validation else None
        if task.answer_questions and self.context.is_main:
            answers = task.answer_questions(self.model, False)
        metrics.log_evaluation(self.step, loss, answers)
        score = loss
        if task.metric != LOSS:  # known to the main process alone
            (score,) = self.context.sum(answers.scores.get(task.metric, math.nan) if answers else 0.0)
        if score is not None and math.isfinite(score):
            self.scores[self.step] = score

    def validation_loss(self) -> float | None:
        """The mean loss over the answer tokens of the held-out batches."""
        context, model, total, tokens = self.context, self.model, 0.0, 0.0
        assert self.task.validation is not None
        for i in range(context.rank, self.task.n_validation, context.world_size):
            batch = to_device(self.task.validation(i), model.device)
            n = count_answer_tokens(batch)
            with autocast(model.device, self.dtype):
                total += n * model(**batch, targets_only=True)[1].item()
            tokens += n
        total, tokens = context.sum(total, tokens)
        return total / tokens if tokens else None

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint that is there, or of this model, the last of equals; None without scores."""
        sign, folder = -1 if self.task.metric == LOSS else 1, self.task.folder
        is_there = {step: step == self.step or checkpoint_path(folder, step).is_dir() for step in self.scores if step}
        scored = {step: sign * self.scores[step] for step in is_there if is_there[step]}
        return max(scored, key=lambda step: (scored[step], step), default=None)

    def save(self) -> None:
        """Write the checkpoint of this step, on the main process."""
        if not self.context.is_main:
            return
        task = self.task
        state = {
            "step": self.step,
            "config": asdict(self.cfg) | {"data": task.data_fingerprint, "validation": task.n_held_out},
            "metric": task.metric,
            "scores": list(self.scores.items()),
            "scaler": self.scaler.state_dict(),
            "streams": self.streams,
        }

        def write(files: Path) -> None:
            checkpointing.write_model(files, self.model, task.tokenizer, base=task.base, prompt=task.prompt)
            checkpointing.write_training_state(files, self.model, self.optimizer, state)

        checkpointing.save_checkpoint(task.folder, self.step, self.cfg.keep_checkpoints, self.best, write)

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Take up optimizer, step and scores of a checkpoint, and say what has changed."""
        task, cfg, state = self.task, self.cfg, checkpoint.state
        checkpointing.restore_optimizer(checkpoint, self.model, self.optimizer, self.scaler)
        self.step = state["step"]
        if state["metric"] == task.metric:
            self.scores = dict(state["scores"])
        if state["config"].get("data") == task.data_fingerprint:
            self.streams = state.get("streams", {})
        if not self.context.is_main:
            return
        stored = state["config"] | {"freeze": tuple(state["config"]["freeze"])}
        changed = [f"{k}={v} instead of {stored[k]}" for k, v in asdict(cfg).items() if stored.get(k, v) != v]
        remedy, use = "", "training goes on with it"
        if self.step >= cfg.max_steps:
            remedy = "; the run is finished: to train on, raise --max-steps or --epochs, or name another --out"
            use = "nothing is learned from it"
        changes = f", with {', '.join(changed)}" if changed else ""
        logger.info(f"resumed {task.folder} at step {self.step}{changes}{remedy}")
        if stored.get("data", task.data_fingerprint) != task.data_fingerprint:
            logger.warning(f"the data has changed: it is {task.data_fingerprint} instead of {stored['data']}; {use}")

    def _restore_best(self) -> int:
        """Give the model the weights of the best checkpoint, and return its step; this one if none was scored."""
        best, model = self.best, self.model
        model.eval()
        if best is None or best == self.step:
            return self.step
        try:
            path = checkpoint_path(self.task.folder, best)
            checkpointing.restore_model(checkpointing.read_checkpoint(path, model), model)
        except DamagedCheckpointError as error:
            logger.warning(f"{error}; the final model is that of step {self.step} instead of the best")
            return self.step
        return best

    def _write_results(self, best: int, stopped: int) -> None:
        """Write the final model, of the step `best`; unless stopped, answer all held-out questions with it."""
        task, folder = self.task, self.task.folder
        with write_errors(folder), atomic_dir(folder) as files:
            checkpointing.write_model(
                files, self.model, task.tokenizer, task.save_dtype, home=folder, base=task.base, prompt=task.prompt
            )
        score = self.scores.get(best)
        if stopped:
            name = signal.Signals(stopped).name
            logger.info(f"{name}: stopped at step {self.step}; run the same command again to go on from there")
        if score is None:
            logger.info(f"{folder} holds the model of step {best}")
        else:
            value = f"{task.metric.replace('_', ' ')} {score:.4f}"
            logger.info(f"{folder} holds the model of step {best}, the best by held-out {value}")
            start = self.scores.get(0)
            if start is not None and (start <= score if task.metric == LOSS else start >= score):
                logger.warning(f"before training it was {start:.4f}: the model has not become better")
        if task.answer_questions and not stopped:
            try:
                report_run(folder, task.answer_questions(self.model, True), task.metric, best)
            except Exception as error:  # the model is written, and the run a success
                logger.warning(f"no {REPORT}: {type(error).__name__}: {error}")

    def _batch_numbers(self) -> range:
        """The numbers of this process's batches, from this step to the last."""
        world_size = self.context.world_size
        per_step = self.cfg.gradient_accumulation_steps * world_size
        return range(self.step * per_step + self.context.rank, self.cfg.max_steps * per_step, world_size)

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        # float16 overflows now and then: the scaler skips that step and lowers its scale, which ends at 1
        may_overflow = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if math.isfinite(loss) and (math.isfinite(grad_norm) or may_overflow):
            return
        paths = [checkpoint_path(self.task.folder, step) for step in checkpointing.checkpoint_steps(self.task.folder)]
        remedy = f"lower lr={self.cfg.lr} and run again to "
        remedy += ", or move it away first to ".join(f"resume from {path}" for path in paths[:-3:-1]) or "start over"
        if self.step == 0:
            remedy = (
                "nothing has been learned yet, so lr is not the reason: look at the examples with --check-data, or "
                "start from another model"
            )
        raise TrainingError(
            f"training diverged: step {self.step} has loss {loss} and gradient norm {grad_norm:.3g}; {remedy}"
        )
