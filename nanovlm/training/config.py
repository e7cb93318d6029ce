"""TrainConfig: each field carries its default, its type and its help, and is a flag of train.py."""

import math
from dataclasses import dataclass, field, fields, replace


def setting(default, help: str, least: float = 0, choices: tuple[str, ...] = ()):
    return field(default=default, metadata={"help": help, "least": least, "choices": choices})


@dataclass(frozen=True)
class TrainConfig:
    """How to learn; see `lr_at` for the two schedules. batch(i) gives batch_size examples; a step learns from
    accumulate of them at once on each process."""

    steps: int = setting(1000, "steps in all", least=1)
    batch_size: int = setting(64, "examples per batch", least=1)
    pack: int = setting(0, "join examples into rows of so many tokens, which see nothing of each other; 0 pads them")
    augment: float = setting(0.0, "crop pictures that are shown again, at random, by up to this part on each side")
    accumulate: int = setting(1, "batches per step, whose gradients are summed: the memory of one", least=1)
    lr: float = setting(1e-3, "the highest learning rate; with --data, if not given, times 192 / lm_hidden_dim")
    vision_rate: float = setting(1.0, "the vision encoder's learning rate as a multiple of lr; 0 freezes it")
    projector_rate: float = setting(1.0, "the projector's likewise")
    language_rate: float = setting(1.0, "the language model's likewise")
    lora_rank: int = setting(0, "learn low-rank adapters beside the weights of the parts not frozen; 0 learns weights")
    lora_alpha: float = setting(16.0, "LoRA: adapters are multiplied by this over their rank")
    lora_words: bool = setting(
        True, "LoRA: embedding and head learn, too, in full; without, only words that the model knows can be learned"
    )
    schedule: str = setting("trapezoid", "how the rate falls: trapezoid or cosine", choices=("trapezoid", "cosine"))
    warmup: int = setting(100, "steps over which the rate rises")
    decay: float = setting(0.4, "trapezoid: the part of all steps, at the end, over which the rate falls to 0")
    weight_decay: float = setting(0.1, "AdamW's, on matrices only")
    beta2: float = setting(0.99, "AdamW's memory of squared gradients")
    max_grad_norm: float = setting(1.0, "longer gradients are clipped to this length")
    dtype: str = setting(
        "auto",
        "to compute in, while weights stay float32: bfloat16, float16 or float32; auto takes the first that is fast",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    gradient_checkpointing: bool = setting(False, "compute each block twice rather than keep what is inside it")
    seed: int = setting(0, "decides the first weights and every batch")
    save_every: int = setting(500, "steps between checkpoints", least=1)
    log_every: int = setting(50, "steps between progress lines", least=1)
    validate_every: int = setting(500, "steps between looks at held-out examples, if there are any", least=1)
    validation_batches: int = setting(8, "batches of held-out examples at each look", least=1)
    tensorboard: bool = setting(False, "write curves for TensorBoard, too (extra: tensorboard)")
    workers: int = setting(1, "processes that prepare batches; 0 prepares them between steps")
    plan: bool = setting(False, "only tell what training takes: parameters, tokens per step, memory at most")
    fsdp: bool = setting(
        False, "under torchrun: each process keeps a part of the weights and moments only, for what does not fit"
    )
    compile: bool = setting(False, "compile the blocks: a minute at the start, a quarter less time per step")

    def __post_init__(self):
        for f in fields(self):
            value, least, choices = getattr(self, f.name), f.metadata["least"], f.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(f"{f.name}={value} is none of {', '.join(choices)}")
            if not choices and not least <= value < float("inf"):
                raise ValueError(f"{f.name}={value} must be a finite number of at least {least}")
        for name, fits, limit in (
            ("lr", self.lr > 0, "above 0"),
            ("lora_alpha", self.lora_alpha > 0, "above 0"),
            ("max_grad_norm", self.max_grad_norm > 0, "above 0"),
            ("decay", self.decay <= 1, "at most 1"),
            ("beta2", self.beta2 < 1, "less than 1"),
            ("augment", self.augment < 0.5, "less than 0.5, at which nothing might be left"),
            ("seed", self.seed < 2**63, "less than 2^63"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)} must be {limit}")
        if not any(self.rates.values()):
            raise ValueError("vision_rate, projector_rate and language_rate are all 0: nothing is left to learn")

    @property
    def rates(self) -> dict[str, float]:
        """The model's three parts and their learning rates, as multiples of lr."""
        return {"vision_encoder": self.vision_rate, "MP": self.projector_rate, "decoder": self.language_rate}

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: it rises over the warm-up, and falls to 0 at the last step.

        A trapezoid stays at its height until the last part of all steps (Hägele et al. 2024), and until it falls,
        resuming with another number of steps is no detour. A cosine (Loshchilov and Hutter 2017) falls all the time.
        """
        if self.schedule == "cosine":
            gone = max(0, step - self.warmup) / max(1, self.steps - self.warmup)
            falling = 0.5 * (1 + math.cos(math.pi * min(1.0, gone)))
        else:
            falling = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.lr * min(1.0, (step + 1) / (self.warmup + 1), falling)


SCENES = TrainConfig(
    steps=5700, lr=1e-3, warmup=300, decay=0.25, compile=True
)  # how the embedded model began, see its card
FINETUNING = TrainConfig(
    steps=850, batch_size=8, augment=0.1, lr=8e-4, warmup=20, decay=0.6, save_every=100, log_every=10
)
ADAPTERS = replace(FINETUNING, lr=3e-3)  # --lora-rank: adapters want a higher rate (Schulman et al. 2025)
