"""The training loop, in the order of events; what it learns from is somebody else's business."""

import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from models.checkpoint import atomic_dir
from models.lora import adapters, merge
from models.vision_language_model import VisionLanguageModel
from nanovlm.data.examples import IGNORE_INDEX
from nanovlm.device import choose_training_dtype
from nanovlm.errors import TrainingError
from nanovlm.training.checkpointing import (
    Stopped,
    asked_to_stop,
    moments_of,
    resume,
    resume_optimizer,
    save,
    write_model,
    writing,
)
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.memory import plan
from nanovlm.training.metrics import Journal
from nanovlm.training.optimizer import accelerated, adamw, freeze
from nanovlm.training.report import write_report

Batch = dict[str, Tensor | None]


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def train(
    model: VisionLanguageModel,
    tokenizer: str,
    batch: Callable[[int], Batch],
    cfg: TrainConfig,
    folder: str | Path,
    stored_as: torch.dtype | None = None,
    log: Callable[[str], None] = progress,
    validation: Callable[[int], Batch] | None = None,
    show: Callable[[VisionLanguageModel], Sequence[tuple[Image.Image, str]]] | None = None,
    data: str | None = None,
) -> VisionLanguageModel:
    """Train model on batch(0), batch(1), ..., cfg.accumulate a step, and write it to folder, weights as stored_as.

    Under torchrun a step learns from cfg.accumulate batches on each process, and the first process writes. With
    cfg.fsdp each keeps a part of the model, of which only the first returns the whole.

    batch is a pure function of its number, so a run that was killed goes on from folder/checkpoints as if nothing
    had happened; after SIGINT or SIGTERM it saves and raises `Stopped`. Every checkpoint is a model that generate.py
    can use. validation(0), ... are held-out batches; show captions held-out pictures, which folder/report.png then
    holds with the first captions and the last. data tells one set of examples from another; a run that goes on with
    another config or other data says so. The trained model is returned: the same, or with cfg.lora_rank
    another, the adapters merged into it. With cfg.plan nothing is trained or written, only told what it would take.
    """
    if cfg.plan:
        log(str(plan(model, batch, cfg)))
        return model
    folder = Path(folder)
    with writing(folder):  # where that is impossible, better now than at the first save
        folder.mkdir(parents=True, exist_ok=True)
    world = DistributedContext(model.device)
    log = log if world.rank == 0 else (lambda line: None)
    dtype = choose_training_dtype(cfg.dtype, model.device)
    scaler = torch.amp.GradScaler(model.device.type, enabled=dtype == torch.float16)
    if cfg.fsdp and world.size == 1:
        raise ValueError("fsdp=True divides a model among processes, and this is one; torchrun starts several")
    if cfg.fsdp and scaler.is_enabled():
        raise ValueError(f"fsdp=True does not work with {dtype}; choose dtype=float32, or leave fsdp out")
    freeze(model, cfg)
    first, before = resume(folder, model)
    if world.sum(first) != [first * world.size]:
        raise TrainingError(f"{folder} holds other checkpoints for other processes; it must be one that all share")
    world.share_weights(model)
    if cfg.fsdp:
        world.shard(model)
    optimizer = adamw(model, cfg)
    resume_optimizer(folder, model, optimizer, scaler)
    if first:
        changed = [f"{k}={v} instead of {before[k]}" for k, v in asdict(cfg).items() if before.get(k, v) != v]
        log(f"resumed {folder} at step {first}" + ", with " * bool(changed) + ", ".join(changed))
        if before.get("data", data) != data:
            log(f"the data has changed: it is {data} instead of {before['data']}; it is learned from here on")
    start, stop = first * cfg.accumulate * world.size, cfg.steps * cfg.accumulate * world.size
    batches = iter(
        DataLoader(
            _Batches(batch, range(start + world.rank, stop, world.size)),
            batch_size=None,
            num_workers=cfg.workers,
            prefetch_factor=4 if cfg.workers else None,
            worker_init_fn=_ignore_signals,
        )
    )
    with (
        accelerated(model, cfg),
        workers_end_with(batches),
        asked_to_stop() as asked,
        closing(world),
        closing(Journal(folder, cfg, first, model.device, log, writes=world.rank == 0)) as journal,
    ):
        if first == 0:
            journal.found(0, *look(model, validation, show, dtype, cfg, world))
        model.train()
        for step in range(first, cfg.steps):
            torch.manual_seed(cfg.seed + step + (world.rank << 40))  # dropout, too, is a function of the step
            for group in optimizer.param_groups:
                group["lr"] = cfg.lr_at(step) * group["rate"]
            inputs = [to_device(batch, model.device) for batch in islice(batches, cfg.accumulate)]
            loss = backward(model, inputs, dtype, scaler, world)
            world.sum_gradients(model, sum(len(one["images"]) for one in inputs if one["images"] is not None))
            read = sum(int((one["attention_mask"] != 0).sum()) for one in inputs)
            loss, read, leaving = world.sum(loss, read, len(asked))
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            norm = (norm.full_tensor() if world.sharded else norm).item()
            # float16 overflows now and then: the scaler skips that step and scales less, down to where it must help
            overflow = scaler.is_enabled() and scaler.get_scale() > 1
            if not math.isfinite(loss) or not (math.isfinite(norm) or overflow):
                raise TrainingError(
                    f"step {step} has loss {loss} and gradient norm {norm:.3g}; "
                    f"lower lr={cfg.lr} and run again to go on from the last checkpoint in {folder}"
                )
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

            done = step + 1
            journal.step(done, loss, cfg.lr_at(step), norm, read)
            if done % cfg.validate_every == 0 or done == cfg.steps:
                journal.found(done, *look(model, validation, show, dtype, cfg, world))
                model.train()
            if done % cfg.save_every == 0 or done == cfg.steps or leaving:
                whole, moments = world.whole(model, cfg), world.gathered(moments_of(model, optimizer))
                if world.rank == 0:
                    save(folder, whole, tokenizer, moments, scaler, cfg, done, data)
            if leaving and done < cfg.steps:
                number = signal.Signals(asked[0] if asked else signal.SIGTERM)
                log(f"{number.name}: stopped and saved {folder} at step {done}; run the same command again to go on")
                raise Stopped(128 + number)
        model = world.whole(model.eval(), cfg)
    if world.rank == 0:
        with writing(folder), atomic_dir(folder) as files:
            write_model(files, model, tokenizer, stored_as)
    if world.rank == 0 and show:
        try:
            write_report(folder, [picture for picture, _ in show(model)])
        except ImportError as error:
            log(f"no report.png: {error}; pip install 'nanovlm[eval]'")
        except OSError as error:  # the model is there
            log(f"no report.png: {error}")
    return merge(model) if adapters(model) and not (world.sharded and world.rank) else model


@torch.no_grad()
def look(
    model: VisionLanguageModel,
    validation: Callable | None,
    show: Callable | None,
    dtype: torch.dtype,
    cfg: TrainConfig,
    world: DistributedContext,
) -> tuple[float | None, list[str]]:
    """The mean loss over the answer tokens of the held-out batches, and the captions of held-out pictures."""
    model = world.whole(model.eval(), cfg) if validation or show else model
    total = answered = 0
    for i in world.turns(cfg.validation_batches if validation else 0):
        batch = to_device(validation(i), model.device)
        n = int((batch["targets"] != IGNORE_INDEX).sum())
        with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
            total += n * model(**batch)[1].item()
        answered += n
    total, answered = world.sum(total, answered)
    captions = [caption for _, caption in show(model)] if show and world.rank == 0 else []
    return total / answered if answered else None, captions


class _Batches(Dataset):
    """batch(number) for each of the numbers, an item each."""

    def __init__(self, batch: Callable[[int], Batch], numbers: range):
        self.batch, self.numbers = batch, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Batch:
        return self.batch(self.numbers[i])


@contextmanager
def workers_end_with(batches: Iterator[Batch]) -> Iterator[None]:
    """Deaf to signals, workers would outlive an error for as long as anybody keeps its traceback."""
    try:
        yield
    finally:
        getattr(batches, "_shutdown_workers", lambda: None)()  # there is none without workers


def _ignore_signals(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal; the one that trains tells the others when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor if tensor is None else tensor.to(device) for name, tensor in batch.items()}


@torch.enable_grad()
def backward(
    model: VisionLanguageModel,
    batches: list[Batch],
    dtype: torch.dtype,
    scaler: torch.amp.GradScaler,
    world: DistributedContext,
) -> float:
    """Sum up the gradients of the mean loss over all answer tokens of the batches here and on other processes.

    A batch's mean counts by its number of answer tokens, so that cutting one batch into several changes nothing.
    Returns the part of that loss that stands here.
    """
    answered = [int((batch["targets"] != IGNORE_INDEX).sum()) for batch in batches]
    if not all(answered):
        raise TrainingError("a batch has no answer to learn; leave examples without one out of it")
    (everywhere,) = world.sum(sum(answered))
    total = 0.0
    for batch, n in zip(batches, answered):
        with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
            _, loss = model(**batch)
        loss = loss * (n / everywhere)
        if loss.requires_grad:  # words alone teach a projector nothing
            scaler.scale(loss).backward()
        total += loss.item()
    return total
