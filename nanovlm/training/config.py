"""TrainConfig: the settings of a training run.

Each field carries its default, its type and its help text; the flags of train.py are made from them.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nanovlm.errors import InputError

RENAMED_FIELDS = {  # as checkpoints and scripts of the first version call them
    "steps": "max_steps",
    "accumulate": "gradient_accumulation_steps",
    "warmup": "warmup_steps",
    "workers": "num_workers",
}
RENAMED_SCHEDULES = {"trapezoid": "wsd"}
BASE_FORMATS = ("bfloat16", "int8", "int4")  # of the frozen weights of a LoRA run, beside float32


def setting(default: Any, help: str, minimum: float = 0, choices: tuple[str, ...] = (), metavar: str = "N") -> Any:
    """A field; a number is at least minimum, a text with choices one of them."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "choices": choices, "metavar": metavar})


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run; a value out of range is an InputError.

    An optimizer step learns from batch_size * gradient_accumulation_steps examples on each process.
    """

    max_steps: int = setting(1000, "total number of optimizer steps", minimum=1)
    batch_size: int = setting(64, "examples per batch", minimum=1)
    gradient_accumulation_steps: int = setting(
        1, "batches per optimizer step, whose gradients are summed; memory is that of one batch", minimum=1
    )
    pack: int = setting(0, "pack examples into rows of up to N tokens that do not attend to each other; 0 pads instead")
    augment: float = setting(0.0, "from an image's second epoch on, crop at random up to this share of each side")
    lr: float = setting(
        1e-3, "peak learning rate; with --data the default is multiplied by 192 / lm_hidden_dim of the model"
    )
    vision_rate: float = setting(1.0, "learning rate of the vision encoder as a multiple of lr; 0 freezes it")
    projector_rate: float = setting(1.0, "the same for the modality projector")
    language_rate: float = setting(1.0, "the same for the language model")
    lora_rank: int = setting(0, "train LoRA adapters of this rank instead of the weights; 0 trains the weights")
    lora_alpha: float = setting(16.0, "LoRA: adapters are scaled by lora_alpha / lora_rank")
    lora_words: bool = setting(True, "LoRA: also train token embeddings and head in full, needed to learn new tokens")
    schedule: str = setting(
        "wsd",
        "learning rate schedule: wsd (warm-up, stable, linear decay) or cosine (warm-up, cosine decay)",
        choices=("wsd", "cosine"),
    )
    warmup_steps: int = setting(100, "steps over which the learning rate rises linearly")
    decay: float = setting(0.4, "wsd: share of all steps, at the end, over which the learning rate falls to 0")
    optimizer: str = setting(
        "adamw",
        "adamw, or muon for the matrices of linear layers, for training from scratch or a model trained by it",
        choices=("adamw", "muon"),
    )
    weight_decay: float = setting(0.1, "weight decay, applied to matrices only")
    beta2: float = setting(0.99, "beta2 of AdamW")
    max_grad_norm: float = setting(1.0, "clip gradients to this norm")
    dtype: str = setting(
        "auto",
        "autocast dtype; weights and optimizer state stay float32. auto takes bfloat16 where the device is fast in it",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    gradient_checkpointing: bool = setting(False, "recompute the blocks' activations in the backward pass: less memory")
    seed: int = setting(0, "random seed of initial weights, data order and dropout")
    save_every: int = setting(500, "steps between checkpoints", minimum=1)
    keep_checkpoints: int = setting(2, "number of newest checkpoints to keep", minimum=1)
    log_every: int = setting(50, "steps between progress lines", minimum=1)
    keep_best: bool = setting(
        True, "with held-out examples: also keep the checkpoint of the best evaluation, whose model is the final one"
    )
    best_by: str = setting(
        "loss",
        "with held-out examples: what makes an evaluation the best: loss, or a metric as in --metric",
        metavar="NAME",
    )
    patience: int = setting(0, "stop after N evaluations in a row without a better one; 0 goes on to the last step")
    validate_every: int = setting(
        500, "steps between evaluations on held-out examples (see --validation); 0 is a tenth of all steps"
    )
    validation_batches: int = setting(8, "batches of held-out examples per evaluation of the loss", minimum=1)
    validation_questions: int = setting(32, "held-out questions answered and scored at each evaluation; 0 answers none")
    tensorboard: bool = setting(False, "also write TensorBoard logs (extra: tensorboard)")
    track: str = setting(
        "none",
        "also log metrics with wandb or trackio, offline unless WANDB_MODE says otherwise (extra: track)",
        choices=("none", "wandb", "trackio"),
    )
    num_workers: int = setting(1, "processes that prepare batches; 0 prepares them in the training process")
    fsdp: bool = setting(False, "under torchrun: shard weights, gradients and optimizer state over the processes")
    compile: bool = setting(False, "compile the blocks: a minute at the start, a quarter less time per step")

    def __post_init__(self) -> None:
        for f in fields(self):
            value, minimum, choices = getattr(self, f.name), f.metadata["minimum"], f.metadata["choices"]
            if choices and value not in choices:
                raise InputError(f"{f.name}={value} is not one of {', '.join(choices)}")
            if not isinstance(value, str) and not minimum <= value < float("inf"):
                raise InputError(f"{f.name}={value} must be a finite number of at least {minimum}")
        for name, in_range, limit in (
            ("lr", self.lr > 0, "above 0"),
            ("lora_alpha", self.lora_alpha > 0, "above 0"),
            ("max_grad_norm", self.max_grad_norm > 0, "above 0"),
            ("decay", self.decay <= 1, "at most 1"),
            ("beta2", self.beta2 < 1, "less than 1"),
            ("augment", self.augment < 0.5, "less than 0.5, which would leave nothing of an image"),
            ("seed", self.seed < 2**63, "less than 2^63"),
        ):
            if not in_range:
                raise InputError(f"{name}={getattr(self, name)} must be {limit}")
        if self.optimizer == "muon" and self.lora_rank:
            raise InputError("optimizer=muon trains whole matrices; omit it with lora_rank, or choose adamw")
        if not any(self.rates.values()):
            raise InputError("vision_rate, projector_rate and language_rate are all 0: no weights are left to train")

    @property
    def rates(self) -> dict[str, float]:
        """The model's three parts and their learning rates, as multiples of lr."""
        return {"vision_encoder": self.vision_rate, "MP": self.projector_rate, "decoder": self.language_rate}

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


def upgrade_settings(stored: dict[str, Any]) -> dict[str, Any]:
    """Settings as a checkpoint of any version stores them, under today's names."""
    settings = {RENAMED_FIELDS.get(name, name): value for name, value in stored.items() if name != "plan"}
    if settings.get("schedule") in RENAMED_SCHEDULES:
        settings["schedule"] = RENAMED_SCHEDULES[settings["schedule"]]
    return settings


# How the embedded model is trained; see its card, nanovlm/assets/README.md.
SCENES = TrainConfig(
    max_steps=6200, batch_size=48, optimizer="muon", lr=1e-3, warmup_steps=100, decay=0.3, compile=True
)
FINETUNING = TrainConfig(
    max_steps=850,
    batch_size=8,
    augment=0.1,
    lr=8e-4,
    warmup_steps=20,
    decay=0.6,
    save_every=100,
    log_every=10,
    validate_every=0,
)
ADAPTERS = replace(FINETUNING, lr=3e-3)  # LoRA wants a higher learning rate (Schulman et al. 2025)
