"""The training loop; a batch is a pure function of its number, so a resumed run equals an uninterrupted one."""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.common import files
from models.lora import adapters, merge
from models.vision_language_model import IGNORE_INDEX, VisionLanguageModel
from nanovlm.device import busy_note, choose_training_dtype
from nanovlm.errors import TrainingError
from nanovlm.evaluation import Evaluation
from nanovlm.training import checkpointing
from nanovlm.training.checkpointing import checkpoint_path, checkpoint_steps, write_errors
from nanovlm.training.config import TrainConfig
from nanovlm.training.cpu_ops import ATTENTION, matmul_attention
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.loader import Batch, TrainingInterrupted, catch_stop_signals, load_batches
from nanovlm.training.metrics import FIRST_STEPS, LOSS, REPORT, MetricsLogger, report_run
from nanovlm.training.optimizer import accelerated, freeze, make_optimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingTask:
    """Batches and held-out questions of a run, and where its files go.

    get_batch must be a pure function of the batch's number. answer_questions(model, everything) answers held-out ones.
    """

    get_batch: Callable[[int], Batch]
    tokenizer: str  # the text of tokenizer.json
    folder: Path
    save_dtype: torch.dtype | None = None  # of the final model's weights; None keeps float32
    validation: Callable[[int], Batch] | None = None  # held-out batches
    n_validation: int = 0  # of these
    answer_questions: Callable[[VisionLanguageModel, bool], Evaluation] | None = None
    metric: str = LOSS  # of these answers, or the loss: says which checkpoint is the best
    is_error_rate: bool = False  # the metric
    data_fingerprint: str | None = None  # kept for the run that resumes this one
    n_held_out: float | str = 0  # a number, a share or a path, kept as well
    base: str | None = None  # the model that adapters belong to
    prompt: str | None = None  # becomes the model's default prompt
    origin: Mapping[str, Any] = field(default_factory=dict)  # flags that name the model to start from
    model_digest: str | None = None  # of its weights

    @property
    def lower_is_better(self) -> bool:
        return self.metric == LOSS or self.is_error_rate


class Trainer:
    """One training run: resumed from the newest of task.folder/checkpoints, or started.

    Under torchrun, each process reads cfg.gradient_accumulation_steps batches a step; the main one writes the files.
    """

    def __init__(self, model: VisionLanguageModel, task: TrainingTask, cfg: TrainConfig):
        self.model = model
        self.task = task
        self.cfg = cfg
        self.context = DistributedContext(model.device)
        self.dtype = choose_training_dtype(cfg.dtype, model.device)
        self.scaler = torch.amp.GradScaler(model.device.type, enabled=self.dtype == torch.float16)
        self.step = 0  # steps done
        self.scores: dict[int, float] = {}  # by step: task.metric on the held-out examples
        self.model_digest = task.model_digest
        self.origin = task.origin  # of the weights, also of a run that is resumed with another model
        self.streams: dict[str, Any] = {}  # where each stream of examples stands, see `load_batches`
        freeze(model, cfg)
        checkpointing.check_disk_space(task.folder, model, cfg)
        self.optimizer = make_optimizer(model, cfg)
        with self.context.lock as lock:  # freed on an error
            with write_errors(task.folder):  # before any work
                task.folder.mkdir(parents=True, exist_ok=True)
                self.context.claim(task.folder)
            if self.context.is_main:
                for folder in (task.folder, task.folder / "checkpoints"):
                    files.remove_parts(folder, seconds=0)  # nobody else writes there
            state = checkpointing.restore_newest(task.folder, model, cfg, self.optimizer)
            self.context.broadcast_weights(model)
            if state:
                self._resume(state)
            self.context.lock = lock.pop_all()

    def run(self) -> VisionLanguageModel:
        """Train until cfg.max_steps, write the best model to task.folder and return it.

        The best is the checkpoint with the best score, the last of equals; without held-out examples the last one. A
        model with adapters is of no use afterwards: the one returned is merged from it. SIGINT and SIGTERM end the run
        after a checkpoint, with the best model so far and TrainingInterrupted. TrainingError if the run diverges.
        """
        with self.context.lock:
            stopped = self._train()
            best = self.best or self.step
            self.model.eval()
            if best != self.step:
                path = checkpoint_path(self.task.folder, best)
                checkpointing.restore(path, self.model, self.cfg, self.optimizer)
            if self.context.is_main:
                self._write_results(best, stopped)
        if stopped:
            raise TrainingInterrupted(128 + stopped)
        return merge(self.model, consume=True) if adapters(self.model) else self.model

    def _train(self) -> int:
        """Train; the number of the signal that ended it early, or 0."""
        cfg = self.cfg
        context = self.context
        first = self.step
        if self.model.device.type == "cpu" and (difference := ATTENTION.difference()):
            logger.warning("%s: training uses it instead of the faster %s", difference, matmul_attention.__module__)
        per_step = cfg.gradient_accumulation_steps * context.world_size
        numbers = range(first * per_step + context.rank, cfg.max_steps * per_step, context.world_size)
        with (
            load_batches(self.task.get_batch, numbers, cfg.num_workers, self.streams) as (batches, reached),
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
                    self.streams |= context.merge(reached)
                    self.save()
                if is_last:
                    return 0
                if n_signals:
                    return signals[0] if signals else signal.SIGTERM
                measured = self._training_step(batches)
                metrics.log_step(self.step, *measured)

    def _training_step(self, batches: Iterator[Batch]) -> tuple[float, float, float, int]:
        """Take a step of the optimizer; returns loss, learning rate, norm of the gradients and number of tokens."""
        cfg = self.cfg
        model = self.model
        context = self.context
        model.train()
        torch.manual_seed(cfg.seed + self.step + (context.rank << 40))  # makes dropout a function of the step
        lr = cfg.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        inputs = list(islice(batches, cfg.gradient_accumulation_steps))
        wall = time.perf_counter()
        cpu = time.process_time()
        with accelerated(model, cfg):
            loss = self.backward(inputs)
        if self.step == FIRST_STEPS and context.is_main and model.device.type == "cpu":
            note = busy_note(time.perf_counter() - wall, time.process_time() - cpu)
            if note:
                logger.info(note)
        context.sum_gradients(model)
        loss, tokens = context.sum(loss, sum(int((batch["attention_mask"] != 0).sum()) for batch in inputs))
        self.scaler.unscale_(self.optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm).item()
        self._check_finite(loss, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        return loss, lr, grad_norm, int(tokens)

    @torch.enable_grad()
    def backward(self, batches: list[Batch]) -> float:
        """Add up the gradients of the mean loss over all answer tokens, of all processes; returns this one's share."""
        counts = list(map(count_answers, batches))
        if not all(counts):
            raise TrainingError("a batch has no answer tokens to learn; remove examples without an answer")
        (answer_tokens,) = self.context.sum(sum(counts))
        total = 0.0
        for batch, count in zip(batches, counts):
            loss = self._loss(batch) * (count / answer_tokens)
            if loss.requires_grad:  # not if only the projector is trained, and the batch has no images
                self.scaler.scale(loss).backward()
            total += loss.item()
        return total

    def _loss(self, batch: Batch) -> Tensor:
        """The mean loss of a batch's answer tokens, computed with autocast."""
        device = self.model.device
        inputs = {name: tensor if tensor is None else tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(**inputs, targets_only=True)[1]

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        # float16 overflows now and then: the scaler skips that step and lowers its scale, which ends at 1
        may_overflow = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if math.isfinite(loss) and (math.isfinite(grad_norm) or may_overflow):
            return
        newest = [str(checkpoint_path(self.task.folder, step)) for step in checkpoint_steps(self.task.folder)[:-3:-1]]
        goal = "resume from " + ", or move it away first to resume from ".join(newest) if newest else "start over"
        remedy = f"lower lr={self.cfg.lr} and run again to {goal}"
        if self.step == 0:
            remedy = "lr is not the reason: look at the examples with --check-data, or start from another model"
        raise TrainingError(
            f"training diverged: step {self.step} has loss {loss} and gradient norm {grad_norm:.3g}; {remedy}"
        )

    @torch.no_grad()
    def _evaluate(self, metrics: MetricsLogger) -> None:
        """Measure loss and answers on held-out examples, and note the score of this step."""
        task = self.task
        self.model.eval()
        score = loss = self.validation_loss() if task.validation else None
        answers = None
        if task.answer_questions and self.context.is_main:
            answers = task.answer_questions(self.model, False)
        metrics.log_evaluation(self.step, loss, answers)
        if task.metric != LOSS:  # known to the main process alone
            (score,) = self.context.sum(answers.to_choose_by(task.metric) if answers else 0.0)
        if score is not None and math.isfinite(score):
            self.scores[self.step] = score

    def validation_loss(self) -> float | None:
        """The mean loss over the answer tokens of the held-out batches."""
        total = tokens = 0.0
        assert self.task.validation is not None
        for i in range(self.context.rank, self.task.n_validation, self.context.world_size):
            batch = self.task.validation(i)
            n = count_answers(batch)
            total += n * self._loss(batch).item()
            tokens += n
        total, tokens = self.context.sum(total, tokens)
        return total / tokens if tokens else None

    @property
    def best(self) -> int | None:
        """Step with the best score among stored checkpoints and this model, the last of equals; None without scores."""
        steps = {*checkpoint_steps(self.task.folder), self.step} & self.scores.keys() - {0}
        sign = -1 if self.task.lower_is_better else 1
        return max(steps, key=lambda step: (sign * self.scores[step], step), default=None)

    def save(self) -> None:
        """Write the checkpoint of this step, on the main process."""
        if not self.context.is_main:
            return
        task = self.task
        state = {
            "step": self.step,
            "config": asdict(self.cfg) | {"data": task.data_fingerprint, "validation": task.n_held_out},
            "origin": self.origin,
            "model_digest": self.model_digest,
            "prompt": task.prompt,
            "metric": task.metric,
            "scores": list(self.scores.items()),
            "scaler": self.scaler.state_dict(),
            "streams": self.streams,
        }
        keep = self.cfg.keep_checkpoints
        checkpointing.save_checkpoint(task, self.model, self.optimizer, state, keep, self.best)

    def _resume(self, state: dict[str, Any]) -> None:
        """Take up step, scores and the model's origin from a checkpoint's trainer.json, and say what has changed."""
        task = self.task
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        if state["metric"] == task.metric:
            self.scores = dict(state["scores"])
        is_finished = self.step >= self.cfg.max_steps
        stored = state["config"] | {"freeze": tuple(state["config"]["freeze"])}
        if stored["data"] == task.data_fingerprint:
            self.streams = state["streams"]
        ours, theirs = (next(iter(origin.values()), "the embedded model") for origin in (task.origin, state["origin"]))
        digests = task.model_digest, state.get("model_digest") or task.model_digest  # none in earlier versions
        if digests[0] != digests[1] and task.model_digest:
            self.origin, self.model_digest = state["origin"], digests[1]
        if not self.context.is_main:
            return
        now = asdict(self.cfg) | {"validation": task.n_held_out, "metric": task.metric, "model": ours}
        before = stored | {"metric": state["metric"], "model": theirs}
        changes = ", ".join(f"{k}={v} instead of {before[k]}" for k, v in now.items() if before.get(k, v) != v)
        logger.info(
            f"resumed {task.folder} at step {self.step}"
            + (f", with {changes}" if changes else "")
            + is_finished * "; the run is finished: to train on, raise --max-steps or --epochs, or name another --out"
        )
        use = "nothing is learned from it" if is_finished else "training goes on with it"
        stay = "weights and run.json stay the latter's: to start from the other, name another --out"
        if self.model_digest != task.model_digest:
            logger.warning(
                f"the model has changed: it is {ours} ({digests[0]}) instead of {theirs} ({digests[1]}); {stay}"
            )
        if stored["data"] != task.data_fingerprint:
            logger.warning(f"the data has changed: it is {task.data_fingerprint} instead of {stored['data']}; {use}")
        if (prompt := state.get("prompt", task.prompt)) != task.prompt:
            logger.warning(f"the prompt has changed: it is {task.prompt!r} instead of {prompt!r}; {use}")

    def _write_results(self, best: int, stopped: int) -> None:
        """Write the final model, of the step `best`; unless stopped, answer all held-out questions with it."""
        task = self.task
        with write_errors(task.folder), files.filling(task.folder) as new:
            checkpointing.write_model(new, self.model, task, is_final=True)
        if stopped:
            name = signal.Signals(stopped).name
            logger.info(f"{name}: stopped at step {self.step}; run the same command again to go on from there")
        line = f"{task.folder} holds the model of step {best}"
        score = self.scores.get(best)
        if score is not None:
            line += f", the best by held-out {task.metric.replace('_', ' ')} {score:.4f}"
        logger.info(line)
        start = self.scores.get(0)
        if score is not None and start is not None and (start <= score if task.lower_is_better else start >= score):
            logger.warning(f"before training it was {start:.4f}: the model has not become better")
        if task.answer_questions and not stopped:
            try:
                report_run(task.folder, task.answer_questions(self.model, True), task.metric, best)
            except Exception as error:  # the model is written, and the run a success
                logger.warning(f"no {REPORT}: {type(error).__name__}: {error}")


def count_answers(batch: Batch) -> int:
    """The number of answer tokens."""
    return int((batch["targets"] != IGNORE_INDEX).sum())
