"""The sizes of minGPT's models, and their config."""

from dataclasses import dataclass, fields
from typing import Any

SIZES = {  # n_layer, n_head, n_embd
    "openai-gpt": (12, 12, 768),  # 117M parameters
    "gpt2": (12, 12, 768),  # 124M
    "gpt2-medium": (24, 16, 1024),  # 350M
    "gpt2-large": (36, 20, 1280),  # 774M
    "gpt2-xl": (48, 25, 1600),  # 1558M
    "gopher-44m": (8, 16, 512),
    "gpt-mini": (6, 6, 192),
    "gpt-micro": (4, 4, 128),
    "gpt-nano": (3, 3, 48),
}

UNSET: Any = None  # in GPTConfig: a number still to be given, by the caller or by model_type


@dataclass
class GPTConfig:
    """Needs vocab_size, block_size, and either a model_type of SIZES or n_layer, n_head and n_embd."""

    model_type: str | None = None
    n_layer: int = UNSET
    n_head: int = UNSET
    n_embd: int = UNSET
    vocab_size: int = UNSET
    block_size: int = UNSET  # maximum context length in tokens
    embd_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    attn_pdrop: float = 0.1

    @classmethod
    def complete(cls, config: Any) -> "GPTConfig":
        """Copy config, such as minGPT's CfgNode, and fill in what it lacks.

        ValueError for a number that is still missing or contradicts model_type.
        """
        cfg = cls(**{f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)})
        if cfg.model_type is not None and cfg.model_type not in SIZES:
            raise ValueError(f"model_type={cfg.model_type} is not one of {', '.join(SIZES)}")
        for name, size in zip(("n_layer", "n_head", "n_embd"), SIZES.get(cfg.model_type or "", ())):
            if getattr(cfg, name) not in (None, size):
                raise ValueError(f"{name}={getattr(cfg, name)}, but {cfg.model_type} has {size}; remove one of the two")
            setattr(cfg, name, size)
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size"):
            if (getattr(cfg, name) or 0) < 1:
                raise ValueError(f"{name}={getattr(cfg, name)}; pass a positive number (model_type gives the sizes)")
        return cfg


@dataclass
class Config(GPTConfig):
    """The homework's sizes for checking one attention layer or block by hand."""

    n_head: int = 3
    n_embd: int = 15
    block_size: int = 11
