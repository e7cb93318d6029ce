"""Train the embedded model from scratch on drawn scenes."""

from functools import partial
from pathlib import Path
from typing import Any

from models.vision_language_model import VisionLanguageModel
from nanovlm.device import choose_device
from nanovlm.synthetic import recipe
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import Run, TrainingTask, run_training
from nanovlm.training.probe import RunEstimate, estimate_run, memory_errors


def train_scenes(cfg: TrainConfig, folder: Path, device: str = "auto") -> VisionLanguageModel:
    """Train the embedded model on drawn scenes, write it to folder and return it; see Trainer.run."""
    return _train_scenes(cfg, device, folder, run_training)


def estimate_scenes(cfg: TrainConfig, device: str = "auto") -> RunEstimate:
    """What `train_scenes` needs with these arguments; leaves nothing on disk."""
    return estimate_run(partial(_train_scenes, cfg, device))


def _train_scenes(cfg: TrainConfig, device: str, folder: Path, run: Run) -> Any:
    model, processor = recipe.make_model(cfg.seed)
    get_batch = recipe.SceneBatches(processor, cfg.batch_size, cfg.seed)
    task = TrainingTask(get_batch, processor.tokenizer.to_json(), folder, save_dtype=recipe.CHECKPOINT_DTYPE)
    with memory_errors():
        return run(model.to(choose_device(device)), task, cfg)
