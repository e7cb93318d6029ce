"""Memory and minutes of a training run, measured by its first steps in this process and a temporary folder."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from models.vision_language_model import VisionLanguageModel
from nanovlm.device import peak_memory
from nanovlm.errors import TrainingError, is_out_of_memory
from nanovlm.evaluation import Evaluation
from nanovlm.training.backward import count_answer_tokens
from nanovlm.training.config import TrainConfig
from nanovlm.training.loader import Batch, load_batches
from nanovlm.training.loop import Trainer, TrainingTask
from nanovlm.training.metrics import StepMetrics

PROBED_STEPS = 12
PROBED_SAVES = 4  # memory grows with checkpoints, too
UNTIMED_STEPS = 3  # the first warms up, and the next two have the largest batches
MARGIN = 0.06  # malloc's fragmentation grows a little with every step; up to 5% was measured within 120 steps
SEARCHED_BATCHES, SEARCH_SECONDS = 64, 5.0  # the largest of these is among the probed
REMEDY = "lower --batch-size and raise --gradient-accumulation-steps, or add --gradient-checkpointing"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunEstimate:
    """What a training run needs on each process. Sizes in bytes, times in seconds."""

    parameters: int  # how many
    trained: int  # how many of them
    tokens: int  # per step, the mean over the probe, padding included
    answer_tokens: int  # per step
    steps: int  # of the whole run
    probed_steps: int
    measured_peak: int  # of the probe; 0 where it cannot be measured (Windows)
    seconds_per_step: float
    seconds: float  # of the whole run, evaluations and checkpoints included

    @property
    def peak(self) -> int:
        return int(self.measured_peak * (1 + MARGIN))

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters, {self.trained:,} of them trained; {self.tokens:,} tokens per step, "
            f"{self.answer_tokens:,} of them answers; peak memory {self.peak / 2**20:,.0f} MiB (measured over "
            f"{self.probed_steps} steps, plus {MARGIN:.0%}); {self.seconds_per_step:.2f} s per step, "
            f"{self.seconds / 60:,.0f} minutes for {self.steps:,} steps"
        )


class Probe(Trainer):
    """The first steps of a training run, with its evaluations and checkpoints, which are timed.

    The second and third step learn from the largest of many batches, by tokens and by images.
    """

    def __init__(self, model: VisionLanguageModel, task: TrainingTask, cfg: TrainConfig):
        self.planned = cfg
        self.batch_sizes: list[tuple[int, int, int]] = []  # tokens, answer tokens and images of each batch
        self.seconds: dict[str, list[float]] = {"step": [], "evaluate": [], "save": []}
        steps = min(PROBED_STEPS, cfg.max_steps)
        every = -(-steps // PROBED_SAVES)
        probed = replace(cfg, max_steps=steps, save_every=every, validate_every=every, keep_checkpoints=1, patience=0)
        probed = replace(probed, image_cache_dir=cfg.image_cache_dir and str(task.folder / "images"))
        probed = replace(probed, tensorboard=False, report_to="none")
        super().__init__(model, task, probed)
        self.task = replace(task, get_batch=self._with_largest_batches(task.get_batch), after_save=None)

    def _with_largest_batches(self, get_batch: Callable[[int], Batch]) -> Callable[[int], Batch]:
        """get_batch with the largest of the first batches in the place of the second and third step's first ones."""
        numbers = range(min(SEARCHED_BATCHES, self.planned.max_steps * self.planned.gradient_accumulation_steps))
        start = time.perf_counter()
        with load_batches(get_batch, numbers, self.cfg.num_workers) as batches:
            for batch in batches:
                n_images = 0 if batch["images"] is None else len(batch["images"])
                self.batch_sizes.append((batch["input_ids"].numel(), count_answer_tokens(batch), n_images))
                if time.perf_counter() - start > SEARCH_SECONDS:
                    break
        tokens, _, images = zip(*self.batch_sizes)
        per_step, rank = self.cfg.gradient_accumulation_steps * self.context.world_size, self.context.rank
        moved = {per_step + rank: tokens.index(max(tokens)), 2 * per_step + rank: images.index(max(images))}
        return partial(_get_moved, get_batch, moved)

    def training_step(self, step: int, batches: Iterator[Batch]) -> StepMetrics:
        return self._timed("step", super().training_step, step, batches)

    def evaluate(self) -> tuple[float | None, Evaluation | None]:
        return self._timed("evaluate", super().evaluate)

    def save(self, step: int) -> None:
        self._timed("save", super().save, step)

    def _timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        self.seconds[name].append(time.perf_counter() - start)
        return result

    def estimate(self) -> RunEstimate:
        """What the whole run needs, measured by running its first steps."""
        cfg, seconds, device = self.planned, self.seconds, self.model.device
        parameters = sum(p.numel() for p in self.model.parameters())  # before the run, which ends without its adapters
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.run()
        steps = seconds["step"][UNTIMED_STEPS:] or seconds["step"][-1:]
        per_step = sum(steps) / len(steps)
        evaluations, saves = 1 + math.ceil(cfg.max_steps / cfg.evaluation_interval), cfg.max_steps / cfg.save_every
        total = sum(seconds["step"][:1]) + per_step * (cfg.max_steps - 1)
        total += evaluations * max(seconds["evaluate"]) + math.ceil(saves) * max(seconds["save"])
        tokens, answer_tokens, _ = map(sum, zip(*self.batch_sizes))
        batches = len(self.batch_sizes) / cfg.gradient_accumulation_steps
        cuda = device.type == "cuda"  # where fragmentation counts, too
        return RunEstimate(
            parameters=parameters,
            trained=trained,
            tokens=round(tokens / batches),
            answer_tokens=round(answer_tokens / batches),
            steps=cfg.max_steps,
            probed_steps=self.cfg.max_steps,
            measured_peak=torch.cuda.max_memory_reserved(device) if cuda else peak_memory(device),
            seconds_per_step=per_step,
            seconds=total,
        )


def _get_moved(get_batch: Callable[[int], Batch], moved: Mapping[int, int], number: int) -> Batch:
    return get_batch(moved.get(number, number))


def estimate_run(make: Callable[[Path], Probe]) -> RunEstimate:
    """What the run of make(folder) needs, measured in a folder that is removed."""
    with TemporaryDirectory(prefix="nanovlm-dry-run-") as folder:
        probe = make(Path(folder) / "out")
        logger.info(f"running {probe.cfg.max_steps} steps; if the process is killed, memory has run out: {REMEDY}")
        logging.disable(logging.WARNING)  # its losses and its best model mean nothing to the user
        try:
            return probe.estimate()
        finally:
            logging.disable(logging.NOTSET)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn running out of memory, here or in a data loader worker, into a TrainingError that says what helps."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if "DataLoader worker (pid" in str(error):  # killed, or exited
            line = str(error).strip().splitlines()[-1]
            raise TrainingError(f"{line}; memory may have run out: --num-workers 0 needs less") from error
        if is_out_of_memory(error):
            raise TrainingError(f"not enough memory; {REMEDY} (--dry-run measures the memory)") from error
        raise
