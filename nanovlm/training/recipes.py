"""Train the embedded model from scratch on drawn scenes."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from models.vision_language_model import VisionLanguageModel
from nanovlm.device import choose_device
from nanovlm.synthetic import recipe
from nanovlm.training.config import FinetuneOptions, TrainConfig
from nanovlm.training.finetuning import check_folder, write_run_file
from nanovlm.training.loop import Trainer, TrainingTask
from nanovlm.training.probe import Probe, RunEstimate, estimate_run, memory_errors

T = TypeVar("T", bound=Trainer)


def train_scenes(options: FinetuneOptions, cfg: TrainConfig) -> VisionLanguageModel:
    """Train the embedded model on drawn scenes, write it to options.out and return it; see Trainer.run."""
    check_folder(options.out, ())
    write_run_file(options, cfg)
    with memory_errors():
        return _start(options, cfg, Trainer).run()


def estimate_scenes(options: FinetuneOptions, cfg: TrainConfig) -> RunEstimate:
    """What `train_scenes` needs with these arguments; leaves nothing on disk."""
    with memory_errors():
        return estimate_run(lambda folder: _start(replace(options, out=folder), cfg, Probe))


def _start(options: FinetuneOptions, cfg: TrainConfig, make: Callable[..., T]) -> T:
    model, processor = recipe.make_model(cfg.seed)
    get_batch = recipe.SceneBatches(processor, cfg.batch_size, cfg.seed)
    task = TrainingTask(get_batch, processor.tokenizer.to_json(), options.out, save_dtype=recipe.CHECKPOINT_DTYPE)
    return make(model.to(choose_device(options.device)), task, cfg)
