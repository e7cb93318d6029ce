"""Memory and minutes of a training run, measured by its first steps in a process and a folder of their own."""

import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from models.vision_language_model import VisionLanguageModel
from nanovlm.device import peak_memory
from nanovlm.errors import TrainingError, is_out_of_memory
from nanovlm.training.config import TrainConfig
from nanovlm.training.loader import Batch, load_batches
from nanovlm.training.loop import Run, Trainer, TrainingTask, count_answer_tokens
from nanovlm.training.metrics import StepMetrics
from nanovlm.training.quantized_base import count_parameters

PROBED_STEPS = 12
PROBED_SAVES = 4  # memory grows with checkpoints, too
UNTIMED_STEPS = 3  # the first warms up, and the next two have the largest batches
MARGIN = 0.06  # malloc's fragmentation grows a little with every step; up to 5% was measured within 120 steps
SEARCHED_BATCHES, SEARCH_SECONDS = 64, 5.0  # the largest of these is among the probed


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
        self.batch_sizes: list[tuple[int, int]] = []  # tokens and answer tokens of each batch
        self.seconds: dict[str, list[float]] = {"step": [], "evaluate": [], "save": []}
        steps = min(PROBED_STEPS, cfg.max_steps)
        interval = -(-steps // PROBED_SAVES)
        probed = replace(
            cfg,
            max_steps=steps,
            save_every=interval,
            validate_every=interval,
            keep_checkpoints=1,
            patience=0,
            tensorboard=False,
            track="none",
            fsdp=cfg.fsdp and "WORLD_SIZE" in os.environ,  # a single process is measured without sharding
        )
        super().__init__(model, task, probed)
        self.task = replace(task, get_batch=self._with_largest_batches(task.get_batch), after_save=None)

    def _with_largest_batches(self, get_batch: Callable[[int], Batch]) -> Callable[[int], Batch]:
        """get_batch with the largest of the first batches in the place of the second and third step's first ones."""
        numbers = range(min(SEARCHED_BATCHES, self.planned.max_steps * self.planned.gradient_accumulation_steps))
        tokens, images = [], []
        start = time.perf_counter()
        with load_batches(get_batch, numbers, self.cfg.num_workers) as batches:
            for batch in batches:
                tokens.append(batch["input_ids"].numel())
                images.append(0 if batch["images"] is None else len(batch["images"]))
                self.batch_sizes.append((tokens[-1], count_answer_tokens(batch)))
                if time.perf_counter() - start > SEARCH_SECONDS:
                    break
        per_step = self.cfg.gradient_accumulation_steps * self.context.world_size
        moved = {
            per_step + self.context.rank: tokens.index(max(tokens)),
            2 * per_step + self.context.rank: images.index(max(images)),
        }
        return partial(_get_moved, get_batch, moved)

    def training_step(self, step: int, batches: Iterator[Batch]) -> StepMetrics:
        with self._timed("step"):
            return super().training_step(step, batches)

    def evaluate(self) -> tuple[float | None, list[str], Mapping[str, float]]:
        with self._timed("evaluate"):
            return super().evaluate()

    def save(self, step: int) -> None:
        with self._timed("save"):
            super().save(step)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - start)

    def estimate(self) -> RunEstimate:
        """What the whole run needs, after this probe has run."""
        cfg, seconds = self.planned, self.seconds
        steps = seconds["step"][UNTIMED_STEPS:] or seconds["step"][-1:]
        per_step = sum(steps) / len(steps)
        evaluations, saves = 1 + math.ceil(cfg.max_steps / cfg.evaluation_interval), cfg.max_steps / cfg.save_every
        total = sum(seconds["step"][:1]) + per_step * (cfg.max_steps - 1)
        total += evaluations * max(seconds["evaluate"]) + math.ceil(saves) * max(seconds["save"])
        tokens, answer_tokens = map(sum, zip(*self.batch_sizes))
        batches = len(self.batch_sizes) / cfg.gradient_accumulation_steps
        return RunEstimate(
            parameters=count_parameters(self.model),
            trained=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            tokens=round(tokens / batches),
            answer_tokens=round(answer_tokens / batches),
            steps=cfg.max_steps,
            probed_steps=self.cfg.max_steps,
            measured_peak=measured_peak(self.model.device),
            seconds_per_step=per_step,
            seconds=total,
        )


def _get_moved(get_batch: Callable[[int], Batch], moved: Mapping[int, int], number: int) -> Batch:
    return get_batch(moved.get(number, number))


def measured_peak(device: torch.device) -> int:
    """Bytes: what this process has reserved on the GPU for cuda, fragmentation included, else its resident memory."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory(device)


def probe(model: VisionLanguageModel, task: TrainingTask, cfg: TrainConfig) -> RunEstimate:
    """What training the model needs, measured by the first steps of it in this process."""
    trainer = Probe(model, task, cfg)
    trainer.run()
    return trainer.estimate()


def estimate_run(train: Callable[[Path, Run], RunEstimate]) -> RunEstimate:
    """train(folder, probe), which calls probe(model, task, cfg), in a new process and a folder that is removed.

    `train` must be picklable. TrainingError if the run does not fit into memory.
    """
    free = _free_memory()
    with (
        TemporaryDirectory(prefix="nanovlm-dry-run-") as folder,
        ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_prepare_process, initargs=(torch.get_num_threads(),)
        ) as pool,
    ):
        try:
            return pool.submit(train, Path(folder) / "out", probe).result()
        except BrokenProcessPool as error:
            raise TrainingError(
                f"not enough memory: the probe of a few steps was killed{free}; lower --batch-size and raise "
                "--gradient-accumulation-steps, or add --gradient-checkpointing"
            ) from error


def _prepare_process(threads: int) -> None:
    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)  # its losses and its best model mean nothing to the user


def _free_memory() -> str:
    """How much memory is free, as a clause; empty where the system does not say it (outside Linux)."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    sizes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return f", and {sizes[0] / 1024:,.0f} MiB were free" if sizes else ""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn running out of memory, here or in a data loader worker, into a TrainingError that says what helps."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if "DataLoader worker (pid" in str(error):  # killed, or exited
            line = str(error).strip().splitlines()[-1]
            raise TrainingError(f"{line} Memory may have run out; --num-workers 0 needs less") from error
        if is_out_of_memory(error):
            raise TrainingError(
                "not enough memory; lower --batch-size and raise --gradient-accumulation-steps, or add "
                "--gradient-checkpointing (--dry-run measures the memory)"
            ) from error
        raise
