"""The settings of a training run: TrainConfig says how to learn, FinetuneOptions which model learns from which data.

Each field carries its default, type, help text, limits and what it needs to have an effect. The flags of train.py, the
keys of run.json and the keyword arguments of Python are made from them.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanovlm.embedded import EMBEDDED
from nanovlm.errors import InputError
from nanovlm.options import ReadOptions, check_settings
from nanovlm.options import setting as bounded

MUON_LR = 5e-4  # of fine-tuning by Muon, for the embedded model
EPOCHS, MAX_STEPS = 45, 4500  # by default each example is shown 45 times, in at least FINETUNING's steps
PATH = (str, os.PathLike)
TURNED_OFF_BY = {"validation": "0", "lora_rank": 0, "schedule": "cosine"}  # see `setting`


def setting(default: Any, help: str, *, needs: str = "", **options: Any) -> Any:
    """A field with a flag, see `models.config.setting`; a number without a lower bound is at least 0, and finite.

    needs names another setting, without which or with whose value in TURNED_OFF_BY this one has no effect.
    """
    if isinstance(default, int | float) and not options.keys() & {"minimum", "above"}:
        options["minimum"] = 0
    if isinstance(default, float) and not options.keys() & {"maximum", "below"}:
        options["below"] = math.inf
    return bounded(default, help, needs=needs, **options)


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained; a value out of range is an InputError.

    An optimizer step learns from batch_size * gradient_accumulation_steps examples on each process.
    """

    max_steps: int = setting(
        1000,
        f"total number of optimizer steps; with --data {EPOCHS} epochs by default, but at least the number named here "
        f"and at most {MAX_STEPS}",
        minimum=1,
    )
    batch_size: int = setting(64, "examples per batch", minimum=1)
    gradient_accumulation_steps: int = setting(
        1, "batches per optimizer step, whose gradients are summed; memory is that of one batch", minimum=1
    )
    pack: int = setting(
        0, "pack examples into rows of up to N tokens that do not attend to each other; 0 pads instead", needs="data"
    )
    augment: float = setting(
        0.0,
        "from an image's second epoch on, move and scale it by up to this share, rotate it by up to 100 times as many "
        "degrees, and change brightness and contrast by up to half as much",
        below=0.5,
        needs="data",
    )
    lr: float = setting(
        1e-3,
        f"peak learning rate; with --data the default, which is {MUON_LR:g} for muon, is multiplied by 192 / "
        "lm_hidden_dim of the model",
        above=0,
    )
    vision_lr_scale: float = setting(1.0, "learning rate of the vision encoder as a multiple of lr; 0 freezes it")
    projector_lr_scale: float = setting(1.0, "the same for the modality projector")
    language_lr_scale: float = setting(1.0, "the same for the language model")
    lora_rank: int = setting(
        0, "train LoRA adapters of this rank instead of the weights; 0 trains the weights", needs="data"
    )
    lora_alpha: float = setting(16.0, "LoRA: adapters are scaled by lora_alpha / lora_rank", above=0, needs="lora_rank")
    train_embeddings: bool = setting(
        True, "LoRA: also train token embeddings and head in full, needed to learn new tokens", needs="lora_rank"
    )
    schedule: str = setting(
        "wsd",
        "learning rate schedule: wsd (warm-up, stable, linear decay) or cosine (warm-up, cosine decay)",
        choices=("wsd", "cosine"),
    )
    warmup_steps: int = setting(100, "steps over which the learning rate rises linearly")
    decay: float = setting(
        0.4, "wsd: share of all steps, at the end, over which the learning rate falls to 0", maximum=1, needs="schedule"
    )
    optimizer: str = setting(
        "adamw",
        "adamw, or muon for the matrices of linear layers; with --data the default is what the model was trained by",
        choices=("adamw", "muon"),
    )
    weight_decay: float = setting(0.1, "weight decay, applied to matrices only")
    beta2: float = setting(0.99, "beta2 of AdamW", below=1)
    max_grad_norm: float = setting(1.0, "clip gradients to this norm", above=0)
    dtype: str = setting(
        "auto",
        "autocast dtype; weights and optimizer state stay float32. auto takes bfloat16 where the device is fast in it",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    gradient_checkpointing: bool = setting(False, "recompute the blocks' activations in the backward pass: less memory")
    seed: int = setting(0, "random seed of initial weights, data order and dropout", below=2**63)
    save_every: int = setting(500, "steps between checkpoints", minimum=1)
    keep_checkpoints: int = setting(2, "number of newest checkpoints to keep", minimum=1)
    log_every: int = setting(50, "steps between progress lines", minimum=1)
    keep_best: bool = setting(
        True, "also keep the checkpoint of the best evaluation, whose model is the final one", needs="validation"
    )
    validate_every: int = setting(
        500, "steps between evaluations on held-out examples; 0 is a tenth of all steps", needs="validation"
    )
    validation_batches: int = setting(
        8, "batches of held-out examples per evaluation of the loss; 0 is all of them", needs="validation"
    )
    validation_questions: int = setting(
        32,
        "held-out questions answered and scored at each evaluation, and all by the final model; 0 answers none",
        needs="validation",
    )
    report_to: str = setting(
        "none",
        "also log metrics with wandb or trackio, offline unless WANDB_MODE says otherwise (extra: track)",
        choices=("none", "wandb", "trackio"),
    )
    num_workers: int = setting(1, "processes that prepare batches; 0 prepares them in the training process")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.optimizer == "muon" and self.lora_rank:
            raise InputError("optimizer=muon trains whole matrices; omit it with lora_rank, or choose adamw")
        if not any(self.lr_scales.values()):
            raise InputError("vision_lr_scale=0 with the other two scales at 0 trains nothing; raise one of the three")

    @property
    def lr_scales(self) -> dict[str, float]:
        """The model's three parts and their learning rates, as multiples of lr."""
        return {
            "vision_encoder": self.vision_lr_scale,
            "MP": self.projector_lr_scale,
            "decoder": self.language_lr_scale,
        }

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations."""
        return self.validate_every or max(1, self.max_steps // 10)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0; both schedules warm up linearly and reach 0 after the last step.

        wsd (warmup-stable-decay, Hägele et al. 2024) is constant until its decay; until then a run can be resumed with
        another max_steps as if it had had that from the start. cosine is that of Loshchilov and Hutter 2017.
        """
        if self.schedule == "cosine":
            progress = max(0, step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
            decay = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        else:
            decay = (self.max_steps - step) / max(1.0, self.decay * self.max_steps)
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1), decay)


@dataclass(frozen=True)
class FinetuneOptions:
    """Which model to fine-tune, on which examples, and where the result goes; a value out of range is an InputError."""

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
        str(EMBEDDED),
        "the model to fine-tune",
        metavar="FOLDER_OR_HUB_ID",
        needs="data",
        default_text="the embedded model",
    )
    revision: str | None = setting(None, "branch, tag or commit of a Hub model", metavar="REVISION", needs="data")
    backbones: Sequence[str | os.PathLike[str]] | None = setting(
        None,
        "start a new model from a pretrained SigLIP and Llama, folders or Hub ids, instead of --model",
        needs="data",
        nargs=2,
        metavar=("VISION", "LANGUAGE"),
    )
    format: str | None = setting(
        None,
        "layout of images and chats to train in: smolvlm is that of transformers' SmolVLM, which llama.cpp and others "
        "read (default: the model's own; nanovlm with --backbones)",
        choices=("nanovlm", "smolvlm"),
        needs="data",
    )
    device: str = setting("auto", "where to train", choices=("auto", "cpu", "cuda", "mps"))
    validation: str | float | None = setting(
        None,
        "hold out N examples, or below 1 a share of them; 0 holds out none; or a folder or file of examples to "
        "evaluate on (default: a tenth, at most 200, but none of fewer than 100 examples or of streamed data)",
        metavar="N_OR_SHARE_OR_PATH",
        needs="data",
    )
    metric: Sequence[str] = setting(
        (),
        "score answers to held-out questions by exact_match, f1, vqa_accuracy, anls, cider, or a "
        "module:function(answer, references) of your own (default: all five); the first, or loss, chooses the best "
        "evaluation (default: f1)",
        metavar="NAME",
        needs="validation",
        action="append",
    )
    epochs: float | None = setting(
        None, "show each example N times, instead of --max-steps", above=0, below=math.inf, needs="data"
    )
    read: ReadOptions = field(default_factory=ReadOptions)
    evaluation_flags: Sequence[str] = ()  # that were typed, and have no effect unless examples are held out
    flags: Mapping[str, Any] | None = None  # for run.json, from which the command line repeats the run
    automatic: Sequence[str] = ()  # settings of TrainConfig that follow from the model and the data, see `choose`

    def __post_init__(self) -> None:
        check_settings(self)


# How the embedded model is trained; see its card, nanovlm/assets/README.md.
SCENES = TrainConfig(max_steps=6200, batch_size=48, optimizer="muon", lr=1e-3, warmup_steps=100, decay=0.3)
FINETUNING = TrainConfig(
    max_steps=850,
    batch_size=8,
    augment=0.15,
    lr=8e-4,
    warmup_steps=20,
    decay=0.6,
    save_every=100,
    log_every=10,
    validate_every=0,
    validation_batches=0,
)
AUTOMATIC = ("optimizer", "lr", "max_steps")
REFERENCE_WIDTH = 192  # lm_hidden_dim of the embedded model, for which the default learning rates were tuned
ADAPTERS = replace(FINETUNING, lr=3e-3)  # LoRA wants a higher learning rate (Schulman et al. 2025)


def choose(
    cfg: TrainConfig, automatic: Sequence[str], *, width: int, optimizer: str | None, steps_per_epoch: float
) -> tuple[TrainConfig, list[str]]:
    """cfg with the automatic settings, and the reasons; docs/training.md shows what the values were chosen by.

    width is the model's lm_hidden_dim: the wider, the lower the learning rate, in proportion (Yang et al. 2022).
    optimizer is what the model was trained by, if that is known, and suits it best; but Muon needs whole matrices.
    steps_per_epoch is 0 if unknown.
    """
    chosen: dict[str, Any] = {}
    reasons = []
    if "optimizer" in automatic and optimizer == "muon" and not cfg.lora_rank:
        chosen["optimizer"] = optimizer
        reasons.append("muon, as the model was trained by it")
    if "lr" in automatic:
        is_muon = chosen.get("optimizer", cfg.optimizer) == "muon"
        chosen["lr"] = (MUON_LR if is_muon else cfg.lr) * REFERENCE_WIDTH / width
        reasons.append(f"learning rate {chosen['lr']:.1e} for a width of {width:,}")
    if "max_steps" in automatic and steps_per_epoch:
        chosen["max_steps"] = min(max(cfg.max_steps, math.ceil(EPOCHS * steps_per_epoch)), MAX_STEPS)
        reasons.append(f"{chosen['max_steps']:,} steps, {chosen['max_steps'] / steps_per_epoch:.0f} epochs")
    return replace(cfg, **chosen), reasons
