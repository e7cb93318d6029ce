"""Train the embedded model from scratch on drawn scenes."""

from collections.abc import Callable
from pathlib import Path

from models.vision_language_model import VisionLanguageModel
from nanovlm.device import choose_device
from nanovlm.processor import Processor
from nanovlm.synthetic import recipe
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import Trainer, TrainingTask
from nanovlm.training.memory import MemoryEstimate, estimate_memory, memory_errors


def _batches(processor: Processor, cfg: TrainConfig) -> Callable[[int], dict]:
    return recipe.batches(processor, batch_size=cfg.batch_size, seed=cfg.seed, pack=cfg.pack)


def train_scenes(cfg: TrainConfig, folder: Path, device: str = "auto") -> VisionLanguageModel:
    """Train the embedded model on drawn scenes, write it to folder and return it; see Trainer.run."""
    model, processor = recipe.make_model(cfg.seed)
    task = TrainingTask(
        _batches(processor, cfg), processor.tokenizer.to_json(), folder, save_dtype=recipe.CHECKPOINT_DTYPE
    )
    with memory_errors():
        return Trainer(model.to(choose_device(device)), task, cfg).run()


def estimate_scenes(cfg: TrainConfig, device: str = "auto") -> MemoryEstimate:
    """What `train_scenes` needs with these arguments."""
    model, processor = recipe.make_model(cfg.seed)
    return estimate_memory(model.to(choose_device(device)), _batches(processor, cfg), cfg)
