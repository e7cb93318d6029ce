"""How a step moves the weights: which of them learn and how fast, in which precision, and what is computed twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from models.lora import adapt
from models.vision_language_model import VisionLanguageModel
from nanovlm.training.config import TrainConfig


def freeze(model: VisionLanguageModel, cfg: TrainConfig) -> None:
    """Let the parts learn whose rate is not 0; the others get no gradients, and a frozen encoder keeps no graph.

    With lora_rank it is not the weights of those parts that learn, but adapters beside them, and with lora_words
    the embedding and the head.
    """
    for part, rate in cfg.rates.items():
        getattr(model, part).requires_grad_(rate > 0)
    if cfg.lora_rank:
        torch.manual_seed(cfg.seed)
        parts = [part for part, rate in cfg.rates.items() if rate]
        adapt(model, cfg.lora_rank, cfg.lora_alpha, parts, cfg.lora_words)


def adamw(model: VisionLanguageModel, cfg: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) that decays matrices only: no norms, biases or embeddings.

    A group's "rate" is that of its part of the model, a multiple of the step's learning rate.
    """
    kept = {id(model.decoder.token_embedding.weight), id(model.vision_encoder.patch_embedding.position_embedding)}
    groups = []
    for part, rate in cfg.rates.items():
        learning = [p for p in getattr(model, part).parameters() if p.requires_grad]
        decays = [p for p in learning if p.ndim >= 2 and id(p) not in kept]
        stays = [p for p in learning if p.ndim < 2 or id(p) in kept]
        groups += [{"params": decays, "weight_decay": cfg.weight_decay, "rate": rate}]
        groups += [{"params": stays, "weight_decay": 0.0, "rate": rate}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, cfg.beta2), fused=True)
    for p in (p for group in groups for p in group["params"]):  # those of what no batch has touched are saved, too
        optimizer.state[p] = {"step": torch.zeros((), device=p.device)}
        optimizer.state[p] |= {moment: torch.zeros_like(p) for moment in ("exp_avg", "exp_avg_sq")}
    return optimizer


@contextmanager
def accelerated(model: VisionLanguageModel, cfg: TrainConfig) -> Iterator[None]:
    """Compile the blocks, keep only what stands between them (Chen et al. 2016), or both, as cfg asks."""
    blocks = [*model.vision_encoder.blocks, *model.decoder.blocks]
    for block in blocks:
        if cfg.gradient_checkpointing:
            forward = torch.compile(block.forward, dynamic=False) if cfg.compile else block.forward
            block.forward = partial(checkpoint, forward, use_reentrant=False)
        elif cfg.compile:
            block.compile(dynamic=False)
    try:
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)
