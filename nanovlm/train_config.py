"""TrainConfig: each field carries its default, its type and its help, and is a flag of train.py."""

from dataclasses import dataclass, field, fields


def setting(default, help: str, least: float = 0):
    return field(default=default, metadata={"help": help, "least": least})


@dataclass(frozen=True)
class TrainConfig:
    """How to learn. The rate rises over the warm-up, stays, and falls to 0 over the last part of all steps
    (Hägele et al. 2024); until it falls, resuming with another number of steps is no detour."""

    steps: int = setting(1000, "steps in all", least=1)
    batch_size: int = setting(64, "examples per step", least=1)
    lr: float = setting(1e-3, "the highest learning rate")
    warmup: int = setting(100, "steps over which the rate rises")
    decay: float = setting(0.4, "the part of all steps, at the end, over which the rate falls to 0")
    weight_decay: float = setting(0.1, "AdamW's, on matrices only")
    beta2: float = setting(0.99, "AdamW's memory of squared gradients")
    max_grad_norm: float = setting(1.0, "longer gradients are clipped to this length")
    seed: int = setting(0, "decides the first weights and every batch")
    save_every: int = setting(500, "steps between checkpoints", least=1)
    log_every: int = setting(50, "steps between progress lines", least=1)
    workers: int = setting(1, "processes that prepare batches; 0 prepares them between steps")
    compile: bool = setting(False, "compile the blocks: a minute at the start, a quarter less time per step")

    def __post_init__(self):
        for f in fields(self):
            value, least = getattr(self, f.name), f.metadata["least"]
            if not least <= value < float("inf"):
                raise ValueError(f"{f.name}={value} must be a finite number of at least {least}")
        for name, fits, limit in (
            ("decay", self.decay <= 1, "at most 1"),
            ("beta2", self.beta2 < 1, "less than 1"),
            ("seed", self.seed < 2**63, "less than 2^63"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)} must be {limit}")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        falling = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.lr * min(1.0, (step + 1) / (self.warmup + 1), falling)


SCENES = TrainConfig(steps=5700, lr=1e-3, warmup=300, decay=0.25, compile=True)  # how the embedded model was made
FINETUNING = TrainConfig(steps=500, batch_size=16, lr=3e-4, warmup=20, save_every=100, log_every=10)
