"""What the training measurements share: a model of a shape, a folder of postcards, and a trainer of both."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from eval.lib.postcards import random_postcard, write_folder
from eval.lib.random_model import write_random_model
from eval.lib.shapes import SHAPES, SMOLLM2_135M
from models.config import VLMConfig
from nanovlm import EMBEDDED
from nanovlm.training.config import FINETUNING
from nanovlm.training.finetuning import FinetuneOptions, prepare
from nanovlm.training.loader import Batch, load_batches
from nanovlm.training.loop import Trainer

EMBEDDED_SHAPE = "embedded"
# nanoVLM-222M's layers in the format of later releases, which has tokens for images
SIGLIP_224: dict[str, Any] = {
    "vit_img_size": 224, "mp_pixel_shuffle_factor": 2, "mp_image_token_length": 49, "max_img_size": 224,
}  # fmt: skip
TRAINED_SHAPES = (EMBEDDED_SHAPE, "222M", "230M", "460M")


@dataclass(frozen=True)
class TrainingSetup:
    """A fine-tuning run to measure: folders of the model and of the data, and the settings that are not defaults."""

    model: Path
    data: Path
    dtype: str = "auto"
    batch_size: int = FINETUNING.batch_size

    def trainer(self, folder: Path, max_steps: int) -> Trainer:
        """A run of max_steps steps on the CPU with the defaults of `train.py --data`, but no augmentation."""
        cfg = replace(FINETUNING, max_steps=max_steps, batch_size=self.batch_size, dtype=self.dtype, random_crop=0.0)
        cfg = replace(cfg, num_workers=0)
        options = FinetuneOptions(
            [str(self.data)], folder, model=str(self.model), device="cpu", validation=0, scale_lr=True
        )
        trainer = Trainer(*prepare(options, cfg))
        trainer.model.train()
        return trainer


def shape_config(shape: str) -> VLMConfig:
    """The config of a published shape, with one tile for each image: postcards are small."""
    if shape == "222M":
        return VLMConfig(**SMOLLM2_135M, **SIGLIP_224)
    cfg = SHAPES[shape][0]
    return replace(cfg, max_img_size=cfg.vit_img_size)


def make_setup(folder: Path, shape: str, images: int, seed: str, dtype: str, batch_size: int) -> TrainingSetup:
    """Write the model, with random weights unless it is the embedded one, and images postcards below folder."""
    model, data, rng = EMBEDDED, folder / "postcards", Random(f"learned {seed}")
    if shape != EMBEDDED_SHAPE:
        model = folder / "model"
        write_random_model(model, shape_config(shape))
    write_folder(data, [random_postcard(rng) for _ in range(images)])
    return TrainingSetup(model, data, dtype, batch_size)


@contextmanager
def batches_of(trainer: Trainer) -> Iterator[Iterator[Batch]]:
    """The batches of a trainer that has not started, prepared in this process."""
    numbers = range(trainer.cfg.max_steps * trainer.cfg.gradient_accumulation_steps)
    with load_batches(trainer.task.get_batch, numbers, 0) as batches:
        yield batches
