"""This project's fine-tuning, alone or beside another's, step by step in turns: loss against time and tokens/s."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, Protocol, cast

from eval.lib.command import table
from eval.lib.random_model import write_random_model
from eval.lib.scene_splits import png
from eval.lib.shapes import SHAPES, SMOLLM2_135M
from models.config import VLMConfig
from nanovlm import EMBEDDED
from nanovlm.data import Batches
from nanovlm.synthetic import caption, random_scene
from nanovlm.training.config import FINETUNING
from nanovlm.training.finetuning import FinetuneOptions, prepare
from nanovlm.training.loader import Batch, load_batches
from nanovlm.training.loop import Trainer
from nanovlm.training.optimizer import accelerated

PROBED_STEPS = 4  # whose median says how many steps fit into the minutes
POINTS = 5  # of the loss curve
EMBEDDED_SHAPE = "embedded"
TRAINED_SHAPES = (EMBEDDED_SHAPE, "222M", "230M", "460M")


def shape_config(shape: str) -> VLMConfig:
    """The config of a published shape, with one tile for each image."""
    if shape == "222M":  # its layers in the format of later releases, which has tokens for images
        siglip: dict[str, Any] = {
            "vit_img_size": 224,
            "mp_pixel_shuffle_factor": 2,
            "mp_image_token_length": 49,
            "max_img_size": 224,
        }
        return VLMConfig(**SMOLLM2_135M, **siglip)
    cfg = SHAPES[shape][0]
    return replace(cfg, max_img_size=cfg.vit_img_size)


@dataclass(frozen=True)
class TrainingSetup:
    """A fine-tuning run to measure: folders of the model and of the data, and the settings that are not defaults."""

    model: Path
    data: Path
    dtype: str = "auto"
    batch_size: int = FINETUNING.batch_size
    augment: float = 0.0

    @classmethod
    def make(cls, folder: Path, shape: str, images: int, **settings: Any) -> "TrainingSetup":
        """Write the model, with random weights unless it is the embedded one, and drawn scenes below folder."""
        model, data, rng = EMBEDDED, folder / "scenes", Random("learned")
        if shape != EMBEDDED_SHAPE:
            write_random_model(model := folder / "model", shape_config(shape))
        data.mkdir(parents=True)
        for i in range(images):
            scene = random_scene(rng)
            (data / f"{i:03}.png").write_bytes(png(scene, rng))
            (data / f"{i:03}.txt").write_text(caption(scene), encoding="utf-8")
        return cls(model, data, **settings)

    def trainer(self, folder: Path, max_steps: int, automatic: Sequence[str] = ("optimizer", "lr")) -> Trainer:
        """A run of max_steps steps on the CPU with the defaults of `train.py --data`; without `optimizer`, AdamW."""
        cfg = replace(
            FINETUNING,
            max_steps=max_steps,
            batch_size=self.batch_size,
            dtype=self.dtype,
            augment=self.augment,
            num_workers=0,
        )
        options = FinetuneOptions(
            [str(self.data)], folder, model=str(self.model), device="cpu", validation=0, automatic=automatic
        )
        trainer = Trainer(*prepare(options, cfg))
        trainer.model.train()
        return trainer

    def batches(self, trainer: Trainer) -> Batches:
        return cast(Batches, trainer.task.get_batch)


@contextmanager
def started(trainer: Trainer) -> Iterator[Iterator[Batch]]:
    """The batches of a trainer that has not started, prepared in this process."""
    numbers = range(trainer.cfg.max_steps * trainer.cfg.gradient_accumulation_steps)
    with accelerated(trainer.model, trainer.cfg), load_batches(trainer.task.get_batch, numbers, 0) as batches:
        yield batches


class Run(Protocol):
    """A run of a fixed number of steps."""

    def losses(self) -> Iterator[float]:
        """Learn from the batches one by one; the loss of each."""

    def save(self) -> Path:
        """Write the trained model; a folder that Captioner reads."""


class OurRun:
    """The training loop of `train.py --data`."""

    def __init__(self, setup: TrainingSetup, folder: Path, max_steps: int):
        self.trainer, self.max_steps = setup.trainer(folder, max_steps), max_steps

    def losses(self) -> Iterator[float]:
        with started(self.trainer) as batches:
            for step in range(self.max_steps):
                yield self.trainer.training_step(step, batches).loss

    def save(self) -> Path:
        self.trainer.write_results(self.trainer.model.eval())
        return self.trainer.task.folder


MakeRun = Callable[[TrainingSetup, Path, int], Run]  # of the setup, an empty folder and the number of steps


@dataclass
class RaceResult:
    """Seconds and loss of each step of a run."""

    name: str
    tokens_per_step: float
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """From the median step after the first, which warms up."""
        return self.tokens_per_step / median(self.seconds[1:] or self.seconds)

    def loss_between(self, since: float, until: float) -> str:
        """Mean loss of the steps that ended between two times; "-" if there are none."""
        ends = [sum(self.seconds[: i + 1]) for i in range(len(self.seconds))]
        losses = [loss for end, loss in zip(ends, self.losses) if since < end <= until]
        return f"{mean(losses):.3f}" if losses else "-"

    def take_step(self, losses: Iterator[float]) -> bool:
        """Add the seconds and the loss of one more step, if there is one."""
        started = time.perf_counter()
        loss = next(losses, None)
        if loss is not None:
            self.seconds.append(time.perf_counter() - started)
            self.losses.append(loss)
        return loss is not None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}


def race(
    setup: TrainingSetup, makers: dict[str, MakeRun], folder: Path, steps: int | None, seconds: float
) -> tuple[list[RaceResult], list[Run]]:
    """Run all, the one that has used less time next: `steps` steps each, or as many as take `seconds`."""
    batches = setup.batches(setup.trainer(folder / "settings", 1))
    tokens = mean(len(batches.row(i).ids) for i in range(32)) * setup.batch_size
    results, runs = [], []
    for i, (name, make) in enumerate(makers.items()):
        planned = steps
        if planned is None:
            probe, losses = RaceResult(name, tokens), make(setup, folder / f"probe-{i}", PROBED_STEPS).losses()
            while probe.take_step(losses):
                pass
            planned = max(2, round(seconds / median(probe.seconds[1:])))
        results.append(RaceResult(name, tokens))
        runs.append(make(setup, folder / f"run-{i}", planned))
    waiting = [(result, run.losses()) for result, run in zip(results, runs)]
    while waiting:
        turn = min(waiting, key=lambda pair: sum(pair[0].seconds))
        if not turn[0].take_step(turn[1]):
            waiting.remove(turn)
    return results, runs


def race_table(results: list[RaceResult]) -> str:
    """Speed and loss in each fifth of the time, a column for each run."""
    slowest = max(sum(result.seconds) for result in results)
    rows = [["", *(result.name for result in results)], ["steps", *(str(len(result.seconds)) for result in results)]]
    rows.append(["seconds", *(f"{sum(result.seconds):.1f}" for result in results)])
    rows.append(["tokens/s", *(f"{result.tokens_per_s:,.0f}" for result in results)])
    for point in range(POINTS if len(results[0].losses) > 2 * POINTS else 0):
        since, until = slowest * point / POINTS, slowest * (point + 1) / POINTS
        texts = [result.loss_between(since, until) for result in results]
        rows.append([f"loss, {since:.0f} to {until:.0f} s", *texts])
    return table(rows)
