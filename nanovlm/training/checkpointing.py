"""What a run needs to go on as if it had never stopped, in folder/checkpoints/step-N: each a model, too."""

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import atomic_dir, load_config, load_model, read_object, write_checkpoint_files
from models.lora import adapters, merge, read_adapters, write_adapters
from models.vision_language_model import VisionLanguageModel
from nanovlm.errors import CheckpointError, TrainingError
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import like

OPTIMIZER, STATE = "optimizer.safetensors", "training.json"


class Stopped(SystemExit):
    """A signal asked training to stop, and all is saved; the code is the shell's, 130 for SIGINT, 143 for SIGTERM."""


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that SIGINT and SIGTERM put their number into instead of stopping us; a second signal stops us at once."""
    asked, before = [], {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def ask(number: int, frame) -> None:
        asked.append(number)
        restore()

    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        restore()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make of a full disk, or of a folder that may not be written, a TrainingError with the way out."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        last, way = checkpoints(folder)[-1:] or ["the start"], "make room" if "No space" in str(error) else "mend that"
        raise TrainingError(
            f"{folder} cannot be written: {error}; {way} and run again to go on from {last[0]}"
        ) from error


@contextmanager
def reading(newest: Path) -> Iterator[None]:
    """Name the way out where a checkpoint is damaged."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointError) as error:
        told = error if isinstance(error, CheckpointError) else f"{OPTIMIZER} cannot be read: {error}"
        raise CheckpointError(f"{newest} is damaged: {told}; move it away to begin again") from None


def write_model(folder: Path, model: VisionLanguageModel, tokenizer: str, dtype: torch.dtype | None = None) -> None:
    """Write the files of a model into folder; those of one with adapters are the merged model's, and the adapters'."""
    write_checkpoint_files(folder, merge(model), tokenizer, dtype)
    if adapters(model):
        write_adapters(folder, model)


def save(
    folder: Path,
    model: VisionLanguageModel,
    tokenizer: str,
    moments: dict[str, Tensor],
    scaler: torch.amp.GradScaler,
    cfg: TrainConfig,
    step: int,
    data: str | None = None,
) -> None:
    """Write folder/checkpoints/step-N, all of it or nothing, and remove the older ones; data says what it read."""
    new = folder / "checkpoints" / f"step-{step}"
    old = [path for path in checkpoints(folder) if path != new]
    state = {"step": step, "config": asdict(cfg) | {"data": data}, "scaler": scaler.state_dict()}
    with writing(folder), atomic_dir(new) as files:
        write_model(files, model, tokenizer)
        save_file({name: tensor.cpu() for name, tensor in moments.items()}, files / OPTIMIZER)
        (files / STATE).write_text(json.dumps(state, indent=2) + "\n")
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """folder/checkpoints/step-N, the newest last."""
    found = [path for path in folder.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def moments_of(model: VisionLanguageModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """What optimizer keeps of each parameter, by the parameter's name and its own."""
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}/{key}", value


def resume(folder: Path, model: VisionLanguageModel) -> tuple[int, dict]:
    """Load the weights of the newest of folder/checkpoints: the steps done and the config they were done with.

    0 and {} without one; what does not fit is a CheckpointError.
    """
    if not (saved := checkpoints(folder)):
        return 0, {}
    newest = saved[-1]
    with reading(newest):
        theirs, before = load_config(newest).to_dict(), read_object(newest / STATE).get("config", {})
    ours = model.cfg.to_dict()
    for name in ours:
        if theirs.get(name) != ours[name]:
            raise CheckpointError(
                f"{newest} holds a model with {name}={theirs.get(name)}, but this one has {name}={ours[name]}; "
                "train it in another folder"
            )
    if bool(rank := before.get("lora_rank")) != bool(adapters(model)):
        raise CheckpointError(f"{newest} was trained with lora_rank={rank}; go on so, or train in another folder")
    restore_weights(newest, model)
    return int(newest.name.removeprefix("step-")), before


def restore_weights(newest: Path, model: VisionLanguageModel) -> None:
    """Load all weights, or, of a model with adapters, these, if it is the model that they were trained on."""
    with reading(newest):
        stored = load_model(newest, model.cfg, model.image_token_id, device=model.device).state_dict()
    if not adapters(model):
        model.load_state_dict(stored)
        return
    read_adapters(newest, model)
    for name, tensor in merge(model).state_dict().items():
        if not torch.allclose(tensor, stored[name], rtol=1e-3, atol=1e-5):
            raise CheckpointError(
                f"{newest} holds adapters of a model with another {name}; "
                "begin with the same model as before, or train in another folder"
            )


def resume_optimizer(
    folder: Path, model: VisionLanguageModel, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Put the moments of the newest checkpoint, if any, and the scaler's state, where they were.

    The moments must be those of the parameters that learn, and of no other.
    """
    if not (saved := checkpoints(folder)):
        return
    newest = saved[-1]
    with reading(newest):
        moments = load_file(newest / OPTIMIZER)
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {key.rpartition("/")[0] for key in moments}
    if wrong := sorted(learning.keys() ^ kept):
        raise CheckpointError(
            f"{newest / OPTIMIZER} has {'' if wrong[0] in kept else 'no '}moments of {wrong[0]}; "
            "go on with the same parts frozen as before, or train in another folder"
        )
    for key, value in moments.items():
        name, _, short = key.rpartition("/")
        optimizer.state[learning[name]][short] = like(value, learning[name])
    state = read_object(newest / STATE).get("scaler")
    if scaler.is_enabled() and state:
        scaler.load_state_dict(state)
