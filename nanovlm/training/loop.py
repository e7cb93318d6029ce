"""The training loop.

Notable features:
- a batch is a pure function of its number, so that a resumed run equals an uninterrupted one bit for bit
- gradient accumulation weighted by answer tokens: cutting a batch into several changes nothing
- data parallelism under torchrun, bfloat16 and float16 autocast
- held-out loss and scored answers, the best model kept; metrics.jsonl, wandb or trackio, report.html
"""

import logging
import math
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from models.checkpoint import atomic_dir
from models.lora import adapters, merge
from models.vision_language_model import VisionLanguageModel
from nanovlm.device import BusyMonitor, choose_training_dtype
from nanovlm.errors import TrainingError
from nanovlm.evaluation import Evaluation
from nanovlm.options import check_output_folder
from nanovlm.training.backward import autocast, backward, count_answer_tokens, count_tokens, to_device
from nanovlm.training.checkpointing import (
    Checkpoint,
    DamagedCheckpointError,
    checkpoint_path,
    checkpoint_paths,
    disk_space,
    load_newest,
    read_checkpoint,
    restore_model,
    restore_optimizer,
    save_checkpoint,
    write_errors,
    write_model,
    write_training_state,
)
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.loader import Batch, TrainingInterrupted, catch_stop_signals, load_batches
from nanovlm.training.metrics import LOSS, REPORT, BestTracker, MetricsLogger, StepMetrics, report_run
from nanovlm.training.optimizer import accelerated, freeze, make_optimizer

ModelWriter = Callable[[Path, VisionLanguageModel, str, torch.dtype | None], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingTask:
    """What a run learns from, and where its files go.

    get_batch(0), get_batch(1), ... must be a pure function of the number. validation(0), ... are held-out batches.
    answer_questions gives a model's scored answers to held-out questions: to some of them, or to all if True follows.
    best_metric, of these answers or the loss, says which evaluation is the best.
    data_fingerprint identifies the examples, so that a resumed run can report that they have changed; n_held_out is the
    number, or the share, of those held out, so that a resumed run can hold out the same.
    """

    get_batch: Callable[[int], Batch]
    tokenizer: str  # the text of tokenizer.json
    folder: Path
    save_dtype: torch.dtype | None = None  # of the final model's weights; None keeps float32
    validation: Callable[[int], Batch] | None = None
    answer_questions: Callable[[VisionLanguageModel, bool], Evaluation] | None = None
    best_metric: str = LOSS
    data_fingerprint: str | None = None
    n_held_out: float = 0
    write_model: ModelWriter = write_model


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
        if not checkpoint_paths(task.folder):  # those of a run that is resumed have their space
            check_output_folder(task.folder, disk_space(model, cfg.keep_checkpoints + 1))  # one more during a save
        with write_errors(task.folder):  # before any work
            task.folder.mkdir(parents=True, exist_ok=True)
        self.context.claim(task.folder)
        self._start_or_resume(load_newest(task.folder, model))

    def _start_or_resume(self, checkpoint: Checkpoint | None) -> None:
        """Weights, optimizer and the best evaluation so far, of the checkpoint if there is one."""
        model, cfg, folder = self.model, self.cfg, self.task.folder
        self.first_step = checkpoint.step if checkpoint else 0
        self.best = BestTracker(folder, cfg, self.task.best_metric, self.first_step)
        if checkpoint:
            restore_model(checkpoint, model)
        self.context.broadcast_weights(model)
        self.optimizer = make_optimizer(model, cfg)
        if checkpoint:
            restore_optimizer(checkpoint, model, self.optimizer, self.scaler)
            if self.context.is_main:
                self._log_resumed(checkpoint)

    def run(self) -> VisionLanguageModel:
        """Train until cfg.max_steps, write the model to task.folder and return it.

        With cfg.keep_best and held-out examples it has the weights of the best evaluation, else those of the last step.
        The model returned is the same object; with cfg.lora_rank another, merged from the first, which is then of no
        use. After SIGINT or SIGTERM a checkpoint is saved and TrainingInterrupted is raised. TrainingError if the run
        diverges or files cannot be written.
        """
        with self.context.lock:
            self._train()
            if self.context.is_main:
                self.write_results()
        return merge(self.model, consume=True) if adapters(self.model) else self.model

    def _train(self) -> None:
        cfg, model, context = self.cfg, self.model, self.context
        with (
            accelerated(model, cfg),
            load_batches(self.task.get_batch, self._batch_numbers(), cfg.num_workers) as batches,
            catch_stop_signals() as signals,
            closing(context),
            context.peer_errors(),
            closing(MetricsLogger(self.task.folder, cfg, self.first_step, context)) as metrics,
        ):
            if self.first_step == 0:
                self._evaluate_at(0, metrics)
            model.train()
            done = self.first_step
            for step in range(self.first_step, cfg.max_steps):
                metrics.start_step()
                metrics.log_step(self.training_step(step, batches))
                done = step + 1
                last = done == cfg.max_steps
                is_best = (done % cfg.evaluation_interval == 0 or last) and self._evaluate_at(done, metrics)
                (stop_requested,) = context.sum(len(signals))
                if done % cfg.save_every == 0 or last or is_best or stop_requested:
                    self.save(done)
                if stop_requested and not last:
                    self._interrupt(done, signals)
            model.eval()
            self._restore_best(done)

    def _evaluate_at(self, step: int, metrics: MetricsLogger) -> bool:
        """Evaluate the model after `step` steps; whether it is the best so far, and so to be kept."""
        loss, answers = self.evaluate()
        metrics.log_evaluation(step, loss, answers)
        value, name = loss, self.task.best_metric
        if name != LOSS and self.task.answer_questions:
            (value,) = self.context.sum(answers.scores.get(name, math.nan) if answers else 0.0)
        return value is not None and self.best.add(step, value) and self.cfg.keep_best

    def _restore_best(self, step: int) -> None:
        """Give the model, which has those of `step`, the weights of the best evaluation."""
        best, cfg, model = self.best, self.cfg, self.model
        if best.step is None or not cfg.keep_best:
            return
        if best.step != step:
            try:
                restore_model(read_checkpoint(checkpoint_path(self.task.folder, best.step), model), model)
            except DamagedCheckpointError as error:
                logger.warning(f"{error}; the final model is that of step {step} instead of the best")
                return
        if self.context.is_main:
            value = f"{best.metric.replace('_', ' ')}, {best.value:.4f}"
            logger.info(f"the final model is that of step {best.step}, with the best validation {value}")
            if not best.improved:
                logger.warning(f"before training it was {best.start:.4f}: the model has not become better")

    def training_step(self, step: int, batches: Iterator[Batch]) -> StepMetrics:
        """Forward and backward passes, gradient clipping and an AdamW step; TrainingError if the run diverges."""
        cfg, model, context = self.cfg, self.model, self.context
        torch.manual_seed(cfg.seed + step + (context.rank << 40))  # makes dropout a function of the step
        lr = cfg.lr_at(step)
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
        self._check_finite(step, loss, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return StepMetrics(step + 1, loss, lr, grad_norm, int(tokens))

    @torch.no_grad()
    def evaluate(self) -> tuple[float | None, Evaluation | None]:
        """The mean loss over the answer tokens of the held-out batches; on the main process, scored answers."""
        task, loss, answers = self.task, None, None
        self.model.eval()
        if task.validation:
            loss = self._validation_loss(task.validation)
        if task.answer_questions and self.context.is_main:
            answers = task.answer_questions(self.model, False)
        self.model.train()
        return loss, answers

    def _validation_loss(self, get_batch: Callable[[int], Batch]) -> float | None:
        context, model = self.context, self.model
        total = tokens = 0.0
        for i in range(context.rank, self.cfg.validation_batches, context.world_size):
            batch = to_device(get_batch(i), model.device)
            n = count_answer_tokens(batch)
            with autocast(model.device, self.dtype):
                total += n * model(**batch, targets_only=True)[1].item()
            tokens += n
        total, tokens = context.sum(total, tokens)
        return total / tokens if tokens else None

    def save(self, step: int) -> None:
        """Write the checkpoint of `step` steps, on the main process."""
        if not self.context.is_main:
            return
        task, model = self.task, self.model
        settings = asdict(self.cfg) | {"data": task.data_fingerprint, "validation": task.n_held_out}
        state = {"step": step, "config": settings, "scaler": self.scaler.state_dict()}

        def write(files: Path) -> None:
            task.write_model(files, model, task.tokenizer, None)
            write_training_state(files, model, self.optimizer, state)

        best_step = self.best.step if self.cfg.keep_best else None
        save_checkpoint(task.folder, step, self.cfg.keep_checkpoints, write, best_step)

    def write_results(self) -> None:
        """Write the final model; answer all held-out questions with it, and report them."""
        folder, task, model = self.task.folder, self.task, self.model
        for leftover in folder.glob(".*.tmp"):  # of a run that was killed while it wrote the final model
            shutil.rmtree(leftover, ignore_errors=True)
        with write_errors(folder), atomic_dir(folder) as files:
            task.write_model(files, model, task.tokenizer, task.save_dtype)
        if task.answer_questions:
            try:
                kept_step = self.best.step if self.cfg.keep_best else None
                report_run(folder, task.answer_questions(model, True), kept_step)
            except Exception as error:  # the model is written, and the run a success
                logger.warning(f"no {REPORT}: {type(error).__name__}: {error}")

    def _log_resumed(self, checkpoint: Checkpoint) -> None:
        folder, stored, data = self.task.folder, checkpoint.settings, self.task.data_fingerprint
        changed = [f"{k}={v} instead of {stored[k]}" for k, v in asdict(self.cfg).items() if stored.get(k, v) != v]
        remedy, use = "", "training goes on with it"
        if checkpoint.step >= self.cfg.max_steps:
            remedy = "; the run is finished: to train on, raise --max-steps or --epochs, or name another --out"
            use = "nothing is learned from it"
        changes = f", with {', '.join(changed)}" if changed else ""
        logger.info(f"resumed {folder} at step {checkpoint.step}{changes}{remedy}")
        if stored.get("data", data) != data:
            logger.warning(f"the data has changed: it is {data} instead of {stored['data']}; {use}")

    def _batch_numbers(self) -> range:
        """The numbers of this process's batches, from the first step to the last."""
        world_size = self.context.world_size
        per_step = self.cfg.gradient_accumulation_steps * world_size
        return range(self.first_step * per_step + self.context.rank, self.cfg.max_steps * per_step, world_size)

    def _check_finite(self, step: int, loss: float, grad_norm: float) -> None:
        # float16 overflows now and then: the scaler skips that step and lowers its scale, which ends at 1
        may_overflow = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if math.isfinite(loss) and (math.isfinite(grad_norm) or may_overflow):
            return
        resumes = [f"resume from {path}" for path in reversed(checkpoint_paths(self.task.folder)[-2:])]
        remedy = f"lower lr={self.cfg.lr} and run again to "
        remedy += ", or move it away first to ".join(resumes) or "start over"
        if step == 0:
            remedy = (
                "nothing has been learned yet, so lr is not the reason: try --dtype float32, look at the examples with "
                "--check-data, or start from another model"
            )
        raise TrainingError(
            f"training diverged: step {step} has loss {loss} and gradient norm {grad_norm:.3g}; {remedy}"
        )

    def _interrupt(self, step: int, signals: list[int]) -> None:
        number = signal.Signals(signals[0] if signals else signal.SIGTERM)
        if self.context.is_main:
            done = f"stopped and saved {self.task.folder} at step {step}"
            logger.info(f"{number.name}: {done}; run the same command again to resume")
        raise TrainingInterrupted(128 + number)
