"""The settings of a training run: TrainConfig for learning, FinetuneOptions for model, data and folder.

The flags of train.py, the keys of run.json and the keyword arguments of Python are made from their fields.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanovlm.console import count
from nanovlm.embedded import EMBEDDED
from nanovlm.errors import CheckpointError, InputError, UsageError
from nanovlm.options import DEVICES, DTYPES, ReadOptions, check_settings, setting

MUON_LR = 5e-4  # of fine-tuning by Muon, for the embedded model
EPOCHS = 45  # by default each example is shown 45 times, in at least FINETUNING's steps
JOINED_EPOCHS = 7  # of --backbones, whose pretrained parts need fewer
MAX_STEPS = 4500
PATH = (str, os.PathLike)
RUN_FILE = "run.json"  # beside a trained model: the flags of its training
PROJECTOR = "MP"
PARTS = {"vision": "vision_encoder", "projector": PROJECTOR, "language": "decoder"}  # as --freeze names them


def read_run(folder: Path) -> dict[str, Any]:
    """The flags in the run.json of a model's folder, {} without one; CheckpointError for one that is broken."""
    from models.checkpoint import read_object  # here, as it imports torch

    path = folder / RUN_FILE
    try:
        return read_object(path) if path.exists() else {}
    except CheckpointError as error:
        raise CheckpointError(f"{error}; correct or remove it, or name another folder") from None


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the training itself; a value out of range is an InputError.

    An optimizer step learns from batch_size * gradient_accumulation_steps examples on each process.
    """

    max_steps: int = setting(
        1000,
        f"optimizer steps in all; with --data by default {EPOCHS} epochs, with --backbones {JOINED_EPOCHS}, but at "
        f"least the number named here and at most {MAX_STEPS}",
        minimum=1,
    )
    batch_size: int = setting(64, "examples per batch", minimum=1)
    gradient_accumulation_steps: int = setting(
        1, "batches per optimizer step, whose gradients are summed; memory is that of one batch", minimum=1
    )
    pack: int = setting(0, "pack examples into rows of up to N tokens that do not attend to each other; 0 pads instead")
    augment: float = setting(
        0.0,
        "strength of changes to images that are shown again: 0.15 moves and scales them by up to 0.15 of a side, "
        "rotates them by up to 15 degrees, and changes brightness and contrast by up to 0.075",
        below=0.5,
    )
    lr: float = setting(
        1e-3,
        "peak learning rate; with --data the default is multiplied by 192 / lm_hidden_dim of the model, and for muon "
        f"it is {MUON_LR:g}",
        above=0,
    )
    projector_lr: float = setting(
        0.0,
        "peak learning rate of the projector, which then learns in full even with LoRA; 0 takes that of the others. "
        "With --backbones the projector is new, and the default higher",
    )
    freeze: Sequence[str] = setting(
        (),
        f"parts of the model that are not trained: {', '.join(PARTS)}. With --backbones the default is vision",
        limits=f"among {', '.join(PARTS)}, but not all three: something must be trained",
        fits=lambda parts: set(parts) < set(PARTS),
        metavar="PART",
        nargs="+",
    )
    lora_rank: int = setting(0, "train LoRA adapters of this rank instead of the weights; 0 trains the weights")
    lora_alpha: float = setting(16.0, above=0)  # adapters are scaled by lora_alpha / lora_rank
    train_embeddings: bool = setting(True)  # LoRA: embeddings and head learn in full, as new words need it
    warmup_steps: int = setting(100, "steps in which the learning rate rises to its peak, at most a tenth of all steps")
    decay: float = setting(0.4, maximum=1)  # share of all steps, at the end, in which the learning rate falls to 0
    optimizer: str = setting(
        "adamw",
        "muon trains the matrices of linear layers, and AdamW the others; with --data the default is the one that "
        "trained the model, if it says, and adamw with --lora-rank",
        choices=("adamw", "muon"),
    )
    weight_decay: float = setting(0.1, "share of the learning rate by which matrices shrink each step")
    beta2: float = setting(0.99, below=1)
    max_grad_norm: float = setting(1.0, above=0)
    dtype: str = setting(
        "auto",
        "dtype of the computation; weights stay float32. auto is bfloat16 where the device is fast in it",
        choices=("auto", *DTYPES),
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass, which takes less memory and more time"
    )
    seed: int = setting(0, "seed of new weights, of the order of examples and of dropout", below=2**63)
    save_every: int = setting(
        0, "steps between checkpoints, each of which is scored on the held-out examples; 0 is a tenth of all steps"
    )
    keep_checkpoints: int = setting(2, minimum=1)  # the newest; the best is kept, too
    log_every: int = setting(50, minimum=1)  # steps between progress lines
    validation_questions: int = setting(32)  # held-out questions answered at each checkpoint; at the end all are
    report_to: str = setting(
        "none",
        "also log metrics with wandb or trackio, offline unless WANDB_MODE says otherwise (extra: track)",
        choices=("none", "wandb", "trackio"),
    )
    num_workers: int = setting(1, "processes that prepare batches; 0 prepares them in the training process")

    def __post_init__(self) -> None:
        object.__setattr__(self, "freeze", tuple(self.freeze))  # JSON gives back a list
        check_settings(self)
        if self.optimizer == "muon" and self.lora_rank:
            raise InputError("muon trains whole matrices; omit it with lora_rank, or choose adamw", field="optimizer")

    @property
    def trained_parts(self) -> list[str]:
        """The model's modules that are trained."""
        return [module for name, module in PARTS.items() if name not in self.freeze]

    @property
    def interval(self) -> int:
        """Steps between checkpoints."""
        return self.save_every or max(1, self.max_steps // 10)

    @property
    def warmup(self) -> int:
        """Steps of warm-up: warmup_steps, but at most a tenth of all, so that the peak is reached."""
        return min(self.warmup_steps, self.max_steps // 10)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: warm-up, stable, linear decay (Hägele et al. 2024).

        Between warm-up and decay the rate is the same for any max_steps, so a run resumed there may have another one.
        During warm-up this holds if warmup_steps are at most a tenth of both.
        """
        decay = (self.max_steps - step) / max(1.0, self.decay * self.max_steps)
        return self.lr * min(1.0, (step + 1) / (self.warmup + 1), decay)


@dataclass(frozen=True)
class FinetuneOptions:
    """The model to fine-tune, the examples, and the folder of the result; a value out of range is an InputError."""

    data: Sequence[str | os.PathLike[str]] = setting(
        (),
        "fine-tune on folders, files or Hub data sets of images and texts, each with an optional share of the examples "
        "as in photos@0.3",
        limits="a list of paths, as ['photos']; save anything else and name its folder",
        fits=lambda data: not isinstance(data, PATH) and all(isinstance(path, PATH) for path in data),
        metavar="PATH[@SHARE]",
        nargs="+",
        action="extend",
    )
    out: Path = setting(  # noqa: RUF009
        Path(), "folder for the model, checkpoints and metrics; a run found there is resumed", metavar="FOLDER"
    )
    model: str | os.PathLike[str] = setting(  # noqa: RUF009
        str(EMBEDDED), "the model to fine-tune", metavar="FOLDER_OR_HUB_ID", default_text="the embedded model"
    )
    backbones: Sequence[str | os.PathLike[str]] | None = setting(
        None,
        "start a new model from a pretrained SigLIP and Llama, folders or Hub ids, instead of --model",
        nargs=2,
        metavar=("VISION", "LANGUAGE"),
    )
    device: str = setting("auto", "where to train", choices=DEVICES)
    validation: str | float | None = setting(
        None,
        "hold out N examples, or a share of them if below 1; 0 holds out none. A folder or file has examples of its "
        "own to evaluate on (default: a tenth, at most 200, but none of fewer than 100 examples or of streamed data)",
        metavar="N_OR_SHARE_OR_PATH",
    )
    metric: str | None = setting(
        None,
        "the best model is the last checkpoint with the highest of this metric over held-out answers: f1, exact_match, "
        "vqa_accuracy, anls, cider or module:function(answer, references); or with the lowest held-out loss, or error "
        "rate, -module:function",
        metavar="NAME",
        default_text="f1; backbones: loss",
    )
    epochs: float | None = setting(None, "show each example N times, instead of --max-steps", above=0, below=math.inf)
    read: ReadOptions = field(default_factory=ReadOptions)
    flags: Mapping[str, Any] | None = None  # for run.json, from which the command line repeats the run
    automatic: Sequence[str] = ()  # settings of TrainConfig that follow from the model and the data, see `choose`

    def __post_init__(self) -> None:
        check_settings(self)


# How the embedded model is trained; see its card, nanovlm/assets/README.md.
SCENES = TrainConfig(max_steps=6200, batch_size=48, optimizer="muon", lr=1e-3, warmup_steps=100, decay=0.3)
FINETUNING = TrainConfig(max_steps=850, batch_size=8, augment=0.15, lr=8e-4, warmup_steps=20, decay=0.6, log_every=10)
AUTOMATIC = ("optimizer", "lr", "max_steps", "freeze")
REFERENCE_WIDTH = 192  # lm_hidden_dim of the embedded model, for which the default learning rates were tuned
ADAPTERS = replace(FINETUNING, lr=3e-3)  # LoRA wants a higher learning rate (Schulman et al. 2025)
# Backbones that are joined, weights or adapters, keep what they know; the new projector between them learns fast.
# Their vocabulary was pretrained, so that adapters need no trained embeddings.
JOINED = replace(FINETUNING, lr=1.5e-4, projector_lr=3e-3)
JOINED_ADAPTERS = replace(ADAPTERS, projector_lr=3e-3, train_embeddings=False)
PRESETS = {"": FINETUNING, "LoRA": ADAPTERS, "backbones": JOINED, "scenes": SCENES}  # as the help names them


def choose_settings(
    options: FinetuneOptions, cfg: TrainConfig, width: int, steps_per_epoch: float, trained_by: str | None = None
) -> tuple[TrainConfig, list[str]]:
    """Apply options.epochs and choose the settings that options.automatic names; returns cfg and the reasons.

    The wider the model, the lower the learning rate, in proportion (Yang et al. 2022). The optimizer that a model was
    trained_by suits it best, but Muon needs whole matrices. Gradients of a new projector would make the encoder
    forget what images show. steps_per_epoch is 0 if unknown.
    """
    chosen: dict[str, Any] = {}
    reasons = []
    if "optimizer" in options.automatic and not cfg.lora_rank and trained_by == "muon":
        chosen["optimizer"] = "muon"
        reasons.append("muon, as the model was trained by it")
    if "lr" in options.automatic:
        is_muon = chosen.get("optimizer", cfg.optimizer) == "muon"
        chosen["lr"] = (MUON_LR if is_muon else cfg.lr) * REFERENCE_WIDTH / width
        reasons.append(f"learning rate {chosen['lr']:.1e} for a width of {width:,}")
    if "freeze" in options.automatic and options.backbones:
        chosen["freeze"] = ("vision",)
        reasons.append("vision frozen, as the projector is new")
    if options.epochs is not None:
        if not steps_per_epoch:
            raise UsageError("--epochs needs data whose size is known, unlike a stream's or scenes'; use --max-steps")
        chosen["max_steps"] = max(1, math.ceil(round(options.epochs * steps_per_epoch, 6)))
    elif "max_steps" in options.automatic and steps_per_epoch:
        epochs = JOINED_EPOCHS if options.backbones else EPOCHS
        chosen["max_steps"] = min(max(cfg.max_steps, math.ceil(epochs * steps_per_epoch)), MAX_STEPS)
        reasons.append(f"{chosen['max_steps']:,} steps, {chosen['max_steps'] / steps_per_epoch:.0f} epochs")
    cfg = replace(cfg, **chosen)
    if cfg.warmup < cfg.warmup_steps:
        reasons.append(f"warm-up of {count(cfg.warmup, 'step')} instead of {cfg.warmup_steps}, at most a tenth of all")
    return cfg, reasons
