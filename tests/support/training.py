"""Training of a model by one call."""

from pathlib import Path

from nanovlm.training.loop import Trainer, TrainingTask


def train(model, tokenizer, get_batch, cfg, folder, **options):
    """Train model, write it to folder and return it; options are the other fields of TrainingTask."""
    return Trainer(model, TrainingTask(get_batch, tokenizer, Path(folder), **options), cfg).run()
