"""Training checkpoints: folder/checkpoints/step-N holds a complete model and all that is needed to resume from it.

Beside the model's own files these are the optimizer's state (optimizer.safetensors), the adapters of a LoRA run, and
training.json: the step, the settings and the gradient scaler's state.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import atomic_dir, load_config, read_object, write_checkpoint_files
from models.lora import adapters, merge_on_disk, merged_state
from models.lora.files import read_adapters, write_adapters
from models.vision_language_model import VisionLanguageModel, load_model
from nanovlm.errors import CheckpointError, TrainingError

OPTIMIZER, STATE = "optimizer.safetensors", "training.json"

logger = logging.getLogger(__name__)


class DamagedCheckpointError(CheckpointError):
    """A training checkpoint with files that are missing or cannot be read."""


@dataclass(frozen=True)
class Checkpoint:
    """A training checkpoint in memory."""

    path: Path
    step: int  # steps done
    settings: dict[str, Any]  # the fields of TrainConfig, "data" and "validation": see TrainingTask
    scaler: dict[str, Any]  # the state of the float16 gradient scaler
    weights: dict[str, Tensor]  # the state dict of the model; of a LoRA run, with merged adapters
    optimizer: dict[str, Tensor]  # see optimizer_state


def checkpoint_paths(folder: Path) -> list[Path]:
    """folder/checkpoints/step-N, the newest last."""
    paths = [path for path in folder.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(paths, key=_step_of)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# ----------------------------------------------------------------------------------------------------------- writing


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk, or a folder without write permission, into a TrainingError that says how to resume."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        paths = checkpoint_paths(folder)
        remedy = "free some disk space" if "No space" in str(error) else "correct that"
        raise TrainingError(
            f"{folder} cannot be written: {error}; {remedy} and run the same command again to "
            + (f"resume from {paths[-1]}" if paths else "start over")
        ) from error


def disk_space(model: VisionLanguageModel, checkpoints: int) -> int:
    """Bytes of a model, of weights being merged, and of checkpoints with two moments of each trained weight, too."""
    size = sum(p.nbytes for p in model.parameters())
    checkpoint = size + 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return size * (2 if adapters(model) else 1) + checkpoints * checkpoint


@dataclass(frozen=True)
class BaseModel:
    """The model that is fine-tuned: a folder or a Hub id at a revision."""

    name: str
    revision: str | None = None


def write_model(
    folder: Path,
    model: VisionLanguageModel,
    tokenizer: str,
    dtype: torch.dtype | None = None,
    *,
    home: str | None = None,
    base: BaseModel | None = None,
) -> None:
    """Write the files of a model into folder; adapters are merged into its weights, and written beside them, too.

    home is the folder where the trained model will be found. Adapters name the base model.
    """
    if not adapters(model):
        return write_checkpoint_files(folder, model, tokenizer, dtype, home)
    with TemporaryDirectory(dir=folder) as scratch:
        write_checkpoint_files(folder, merge_on_disk(model, Path(scratch), dtype), tokenizer, dtype, home)
    write_adapters(folder, model, base.name if base else None, base.revision if base else None)


def optimizer_state(model: VisionLanguageModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors as ("name of the parameter/name of the tensor", tensor)."""
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}/{key}", value


def write_training_state(
    folder: Path, model: VisionLanguageModel, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Write what a checkpoint holds beside the model; state has "step", "config" and "scaler"."""
    save_file({name: tensor.cpu() for name, tensor in optimizer_state(model, optimizer)}, folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n")


def save_checkpoint(
    folder: Path, step: int, keep: int, write: Callable[[Path], None], best_step: int | None = None
) -> None:
    """Make folder/checkpoints/step-N of the files that `write` puts into a folder: all of them, or none.

    Afterwards the oldest checkpoints are removed; `keep` stay, and that of best_step.
    """
    path = checkpoint_path(folder, step)
    for leftover in path.parent.glob(".*.tmp"):  # of a run that was killed while it wrote a checkpoint
        shutil.rmtree(leftover, ignore_errors=True)
    with write_errors(folder):
        if path.exists():  # a damaged one; the run was resumed from an older one
            shutil.rmtree(path)
        with atomic_dir(path) as files:
            write(files)
    until_now = [other for other in checkpoint_paths(folder) if _step_of(other) <= step]
    for other in until_now[:-keep]:
        if _step_of(other) != best_step:
            shutil.rmtree(other, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------- reading


def load_newest(folder: Path, model: VisionLanguageModel) -> Checkpoint | None:
    """Read the newest of folder/checkpoints that is not damaged; None if there are none.

    CheckpointError if all are damaged, or if the newest belongs to another model.
    """
    damaged: list[str] = []
    for path in reversed(checkpoint_paths(folder)):
        try:
            checkpoint = read_checkpoint(path, model)
            for message in damaged:
                logger.warning(f"{message}; resuming from {path} instead")
            return checkpoint
        except DamagedCheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"{damaged[0]}; move it away to start over")
    return None


def stored_settings(folder: Path) -> dict[str, Any] | None:
    """The settings in the newest of folder/checkpoints, see Checkpoint.settings; None if there are none to read."""
    for path in reversed(checkpoint_paths(folder)):
        with suppress(DamagedCheckpointError), _damage(path):
            return read_object(path / STATE).get("config", {})
    return None


def read_checkpoint(path: Path, model: VisionLanguageModel) -> Checkpoint:
    """Read a checkpoint of the same model; CheckpointError if it is of another, DamagedCheckpointError if damaged."""
    with _damage(path):
        cfg, state = load_config(path), read_object(path / STATE)
        settings = state.get("config", {})
    stored, wanted = cfg.to_dict(), model.cfg.to_dict()
    for name in wanted.keys() - {"lm_tokenizer"}:  # which says where the tokenizer is found, not what it is
        if stored.get(name) != wanted[name]:
            raise CheckpointError(
                f"{path} holds a model with {name}={stored.get(name)}, but this one has {name}={wanted[name]}; "
                "train it in another folder"
            )
    rank = settings.get("lora_rank") or 0
    if ({module.rank for module in adapters(model).values()} or {0}) != {rank}:
        raise CheckpointError(
            f"{path} was trained with lora_rank={rank}; resume with the same, or train in another folder"
        )
    with _damage(path):
        weights = load_model(path, model.cfg, model.image_token_id, device=model.device).state_dict()
        optimizer = _read_optimizer(path / OPTIMIZER)
    return Checkpoint(path, _step_of(path), settings, state.get("scaler") or {}, weights, optimizer)


def _read_optimizer(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from None


def restore_model(checkpoint: Checkpoint, model: VisionLanguageModel) -> None:
    """Load the weights; of a model with adapters only these, if the model is the one that they were trained on.

    CheckpointError unless the parameters that are trained now are those that were.
    """
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    stored = {name.rpartition("/")[0] for name in checkpoint.optimizer}
    for name in sorted(trained ^ stored)[:1]:
        raise CheckpointError(
            f"{checkpoint.path} has {'' if name in stored else 'no '}moments of {name}; "
            "resume with the same parts frozen as before, or train in another folder"
        )
    if not adapters(model):
        model.load_state_dict(checkpoint.weights)
        return
    read_adapters(checkpoint.path, model)
    for name, tensor in merged_state(model):
        if not torch.allclose(tensor, checkpoint.weights[name].to(tensor.device), rtol=1e-3, atol=1e-5):
            raise CheckpointError(
                f"{checkpoint.path} holds adapters of a model with another {name}; "
                "start from the same model as before, or train in another folder"
            )


def restore_optimizer(
    checkpoint: Checkpoint, model: VisionLanguageModel, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Load the state of optimizer and scaler; CheckpointError if it is of another optimizer."""
    ours, stored = dict(optimizer_state(model, optimizer)), checkpoint.optimizer
    if ours.keys() != stored.keys():
        before = f"{checkpoint.path} was trained with optimizer={checkpoint.settings.get('optimizer')}"
        raise CheckpointError(f"{before}; resume with the same, or train in another folder")
    for name, value in stored.items():
        ours[name].copy_(value)
    if scaler.is_enabled() and checkpoint.scaler:
        scaler.load_state_dict(checkpoint.scaler)
