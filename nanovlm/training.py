"""The training loop, in the order of events; what it learns from is somebody else's business."""

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from models.checkpoint import CheckpointError, new_folder, read_config, read_model, write_checkpoint, write_files
from models.vision_language_model import VisionLanguageModel
from nanovlm.data import IGNORED
from nanovlm.device import native_bfloat16
from nanovlm.train_config import TrainConfig

Batch = dict[str, Tensor | None]
OPTIMIZER, STATE = "optimizer.safetensors", "training.json"


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class TrainingError(RuntimeError):
    """Training cannot go on; what was saved before is intact."""


def train(
    model: VisionLanguageModel,
    tokenizer: str,
    batch: Callable[[int], Batch],
    cfg: TrainConfig,
    folder: str | Path,
    stored_as: torch.dtype | None = None,
    log: Callable[[str], None] = progress,
) -> VisionLanguageModel:
    """Train model on batch(0), batch(1), ... batch(cfg.steps - 1) and write it to folder, weights as stored_as.

    batch is a pure function of the step, so a run that was killed goes on from folder/checkpoints as if nothing
    had happened. Every checkpoint is a model that generate.py can use.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)  # where that is impossible, better now than at the first save
    optimizer = adamw(model, cfg)
    first = resume(folder, model, optimizer)
    if first:
        before = json.loads((checkpoints(folder)[-1] / STATE).read_text())["config"]
        changed = [f"{k}={v} instead of {before[k]}" for k, v in asdict(cfg).items() if before.get(k, v) != v]
        log(f"resumed {folder} at step {first}" + ", with " * bool(changed) + ", ".join(changed))
    model.train()
    if cfg.compile:
        for block in (*model.vision_encoder.blocks, *model.decoder.blocks):
            block.compile(dynamic=False)
    loader = DataLoader(
        _Steps(batch, first, cfg.steps),
        batch_size=None,
        num_workers=cfg.workers,
        prefetch_factor=4 if cfg.workers else None,
    )
    autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=native_bfloat16(model.device))
    started, losses, answered = time.perf_counter(), [], 0
    for step, inputs in enumerate(loader, start=first):
        torch.manual_seed(cfg.seed + step)  # dropout, too, is a function of the step
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr_at(step)
        inputs = {name: tensor if tensor is None else tensor.to(model.device) for name, tensor in inputs.items()}
        with autocast:
            _, loss = model(**inputs)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]) or not math.isfinite(norm):
            raise TrainingError(
                f"step {step} has loss {losses[-1]} and gradient norm {norm:.3g}; "
                f"lower lr={cfg.lr} and run again to go on from the last checkpoint in {folder}"
            )
        optimizer.step()
        optimizer.zero_grad()

        done = step + 1
        answered += int((inputs["targets"] != IGNORED).sum())
        if done % cfg.log_every == 0 or done == cfg.steps:
            pace = (time.perf_counter() - started) / (done - first)
            log(
                f"step {done}/{cfg.steps}  loss {sum(losses) / len(losses):.4f}  lr {cfg.lr_at(step):.1e}  "
                f"{pace:.2f} s/step  {answered / (done - first) / pace:,.0f} answer tokens/s  "
                f"{(cfg.steps - done) * pace / 60:.0f} min left"
            )
            losses.clear()
        if done % cfg.save_every == 0 or done == cfg.steps:
            save(folder, model, tokenizer, optimizer, cfg, done)
    write_checkpoint(folder, model.eval(), tokenizer, stored_as)
    return model


class _Steps(Dataset):
    """batch(first) ... batch(last - 1), an item each."""

    def __init__(self, batch: Callable[[int], Batch], first: int, last: int):
        self.batch, self.first, self.last = batch, first, last

    def __len__(self) -> int:
        return max(0, self.last - self.first)

    def __getitem__(self, i: int) -> Batch:
        return self.batch(self.first + i)


def adamw(model: VisionLanguageModel, cfg: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) that decays matrices only: no norms, biases or embeddings."""
    kept = {id(model.decoder.token_embedding.weight), id(model.vision_encoder.patch_embedding.position_embedding)}
    decays = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in kept]
    stays = [p for p in model.parameters() if p.ndim < 2 or id(p) in kept]
    groups = [{"params": decays, "weight_decay": cfg.weight_decay}, {"params": stays, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, cfg.beta2), fused=True)


def save(
    folder: Path,
    model: VisionLanguageModel,
    tokenizer: str,
    optimizer: torch.optim.Optimizer,
    cfg: TrainConfig,
    step: int,
) -> None:
    """Write folder/checkpoints/step-N, all of it or nothing, and remove the older ones."""
    moments = {
        f"{name}/{key}": value.cpu()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    new = folder / "checkpoints" / f"step-{step}"
    old = [path for path in checkpoints(folder) if path != new]
    with new_folder(new) as files:
        write_files(files, model, tokenizer)
        save_file(moments, files / OPTIMIZER)
        (files / STATE).write_text(json.dumps({"step": step, "config": asdict(cfg)}, indent=2) + "\n")
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """folder/checkpoints/step-N, the newest last."""
    found = [path for path in folder.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def resume(folder: Path, model: VisionLanguageModel, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest of folder/checkpoints into model and optimizer; the number of steps done, 0 without one."""
    if not (saved := checkpoints(folder)):
        return 0
    newest = saved[-1]
    theirs, ours = read_config(newest).to_dict(), model.cfg.to_dict()
    for name in ours:
        if theirs.get(name) != ours[name]:
            raise CheckpointError(
                f"{newest} holds a model with {name}={theirs.get(name)}, but this one has {name}={ours[name]}; "
                "train it in another folder"
            )
    model.load_state_dict(read_model(newest, model.cfg, model.image_token_id).state_dict())
    try:
        moments = load_file(newest / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{newest / OPTIMIZER} cannot be read: {error}") from None
    for name, parameter in model.named_parameters():
        keys = [key for key in moments if key.rpartition("/")[0] == name]
        if not keys:
            raise CheckpointError(f"{newest / OPTIMIZER} has no moments of {name}")
        for key in keys:
            short = key.rpartition("/")[2]
            optimizer.state[parameter][short] = moments[key].to(parameter.device if short != "step" else "cpu")
    return int(newest.name.removeprefix("step-"))
