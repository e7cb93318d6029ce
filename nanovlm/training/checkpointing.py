"""Training checkpoints: folder/checkpoints/step-N holds a complete model and what a resumed run needs beside it:
the optimizer's state (optimizer.safetensors), the adapters of a LoRA run, and trainer.json, see `Trainer.save`."""

import errno
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint import load_config, open_tensors, read_object, why_unusable, write_checkpoint_files
from models.common import files
from models.lora import adapters, merge_on_disk, merged_state
from models.lora.files import read_adapters, write_adapters
from models.vision_language_model import VisionLanguageModel, load_model
from nanovlm.data.mixture import parse_validation
from nanovlm.embedded import write_prompt
from nanovlm.errors import BusyError, CheckpointError, TrainingError, UsageError
from nanovlm.options import check_output_folder
from nanovlm.training.config import TrainConfig

if TYPE_CHECKING:
    from nanovlm.training.loop import TrainingTask

OPTIMIZER = "optimizer.safetensors"
STATE = "trainer.json"
FIXED = ("lora_rank", "lora_alpha", "train_embeddings", "optimizer")  # settings that a resumed run must have, too
SCALER = torch.amp.GradScaler("cpu").state_dict().keys()
NOT_NEGATIVE = ("/step", "/exp_avg_sq")

logger = logging.getLogger(__name__)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step}"


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps N of folder/checkpoints/step-N, the newest last."""
    names = [path.name.removeprefix("step-") for path in folder.glob("checkpoints/step-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def stored_settings(folder: Path) -> dict[str, Any] | None:
    """The settings in the newest readable checkpoint: TrainConfig's, "data" and "validation"; None without any."""
    for step in reversed(checkpoint_steps(folder)):
        with suppress(CheckpointError):
            return read_state(checkpoint_path(folder, step))["config"]
    return None


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk, or a folder without write permission, into a TrainingError that says how to resume."""
    try:
        yield
    except BusyError:
        raise
    except OSError as error:
        steps = checkpoint_steps(folder)
        remedy = "free some disk space" if error.errno == errno.ENOSPC else "correct that"
        goal = f"resume from {checkpoint_path(folder, steps[-1])}" if steps else "start over"
        raise TrainingError(
            f"{folder} cannot be written: {error}; {remedy} and run the same command again to {goal}"
        ) from error


def check_disk_space(folder: Path, model: VisionLanguageModel, cfg: TrainConfig) -> None:
    """Raise InputError for a new folder without space for model and checkpoints, which hold two moments a weight."""
    size = sum(p.nbytes for p in model.parameters())
    moments = 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if not checkpoint_steps(folder):  # those of a run that is resumed have their space
        check_output_folder(folder, 2 * size + (cfg.keep_checkpoints + 2) * (size + moments))


def write_model(folder: Path, model: VisionLanguageModel, task: "TrainingTask", is_final: bool = False) -> None:
    """Write a model's files and its prompt; adapters are merged, and also written. Checkpoints are in float32."""
    if task.prompt is not None:
        write_prompt(folder, task.prompt)
    dtype = task.save_dtype if is_final else None
    where = str(task.folder.resolve()) if is_final else None
    if not adapters(model):
        return write_checkpoint_files(folder, model, task.tokenizer, dtype, where)
    with files.scratch_folder(folder) as scratch:
        write_checkpoint_files(folder, merge_on_disk(model, scratch, dtype), task.tokenizer, dtype, where)
    write_adapters(folder, model, task.base)


def optimizer_state(model: VisionLanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by "name of the parameter/name of the tensor"."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_checkpoint(
    task: "TrainingTask",
    model: VisionLanguageModel,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
    best: int | None,
) -> None:
    """Write all files of a checkpoint, or none. Keep the newest and the best."""
    folder = task.folder
    step = state["step"]
    path = checkpoint_path(folder, step)
    with write_errors(folder):
        if path.exists():  # a damaged one; the run was resumed from an older one
            files.remove_folder(path)
        with files.filling(path) as new:
            write_model(new, model, task)
            save_file({name: t.cpu() for name, t in optimizer_state(model, optimizer).items()}, new / OPTIMIZER)
            files.replace(new / STATE, json.dumps(state, indent=2) + "\n")
    until_now = [other for other in checkpoint_steps(folder) if other <= step]
    for other in until_now[:-keep]:
        if other != best:
            files.remove_folder(checkpoint_path(folder, other))


def restore_newest(
    folder: Path, model: VisionLanguageModel, cfg: TrainConfig, optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """`restore` the newest of folder/checkpoints that is not damaged; CheckpointError if all are, None without any."""
    damaged: list[str] = []
    for step in reversed(checkpoint_steps(folder)):
        path = checkpoint_path(folder, step)
        try:
            state = restore(path, model, cfg, optimizer)
        except (OSError, CheckpointError) as error:
            damaged.append(f"{path} is damaged: {error}")
            continue
        for message in damaged:
            logger.warning(f"{message}; resuming from {path} instead")
        return state
    if damaged:
        raise CheckpointError(f"{damaged[0]}; move it away to start over")
    return None


def restore(
    path: Path, model: VisionLanguageModel, cfg: TrainConfig, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Load a checkpoint's weights into model and its tensors into optimizer, and return its trainer.json.

    UsageError for a checkpoint of another model or of other settings, CheckpointError for files that cannot be read,
    or hold what no run writes.
    """
    state = read_state(path)
    before = load_config(path).to_dict() | state["config"]
    now = model.cfg.to_dict() | {name: getattr(cfg, name) for name in FIXED} | {"freeze": list(cfg.freeze)}
    now.pop("lm_tokenizer", None)  # which says where the tokenizer is, not what it is
    for name, value in now.items():
        if before.get(name) != value:
            raise UsageError(
                f"{path} was trained with {name}={before.get(name)}, but this run has {name}={value}; "
                "resume with the same, or train in another folder"
            )
    weights = load_model(path, model.cfg, model.image_token_id, device=model.device).state_dict()
    tensors = optimizer_state(model, optimizer)
    stored = read_optimizer(path / OPTIMIZER, tensors)
    if adapters(model):
        read_adapters(path, model)
        for name, tensor in merged_state(model):
            if not torch.allclose(tensor, weights[name].to(tensor.device), rtol=1e-3, atol=1e-5):
                raise UsageError(
                    f"{path} holds adapters of a model with another {name}; "
                    "start from the same model as before, or train in another folder"
                )
    else:
        model.load_state_dict(weights)
    for name, tensor in tensors.items():
        tensor.copy_(stored[name])
    return state


def read_state(path: Path) -> dict[str, Any]:
    """The object in trainer.json of the checkpoint path; CheckpointError unless a run could have written it."""
    state = read_object(path / STATE)
    try:
        config, scaler = state["config"], state["scaler"]
        TrainConfig(**{name: value for name, value in config.items() if name in TrainConfig.__dataclass_fields__})
        parse_validation(config["validation"])
        is_written = {
            "step": type(state["step"]) is int and path.name == f"step-{state['step']}",
            "metric": type(state["metric"]) is str,
            "scores": all(type(step) is int and math.isfinite(score) for step, score in state["scores"]),
            "scaler": scaler.keys() in (set(), SCALER) and all(0 <= number < math.inf for number in scaler.values()),
            "streams": type(state["streams"]) is dict,
            "freeze": type(config["freeze"]) is list,
            "data": type(config["data"]) in (str, NoneType),
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, UsageError) as error:
        raise CheckpointError(f"{path / STATE} is not as a run writes it: {error}") from None
    if wrong := [name for name, is_right in is_written.items() if not is_right]:
        raise CheckpointError(f"{path / STATE} is not as a run writes it: {wrong[0]}")
    return state


def read_optimizer(path: Path, empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of optimizer.safetensors; CheckpointError unless they are like those of empty, and finite."""
    with open_tensors(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    if differing := sorted(tensors.keys() ^ empty.keys()):
        raise CheckpointError(f"{path}: {differing[0]} is in only one of file and optimizer")
    for name, tensor in tensors.items():
        like = empty[name]
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            found = f"{tuple(tensor.shape)}, {tensor.dtype}"
            raise CheckpointError(f"{path}: {name} is {found}, not {tuple(like.shape)}, {like.dtype}")
        if reason := why_unusable(tensor, tensor.dtype):
            raise CheckpointError(f"{path}: {name} {reason}")
        if name.endswith(NOT_NEGATIVE) and (tensor < 0).any():
            raise CheckpointError(f"{path}: {name} is negative")
    return tensors
