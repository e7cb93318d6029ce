"""AdamW or Muon for the three parts of the model, which of them are trained, and how their blocks are executed."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from models.config import VLMConfig
from models.lora import adapt
from models.vision_language_model import VisionLanguageModel
from nanovlm.training.config import TrainConfig
from nanovlm.training.cpu_ops import cpu_ops
from nanovlm.training.muon import Muon

MUON_RATE = 3.0  # Muon takes larger steps than AdamW; the other parameters learn at AdamW's rate


def freeze(model: VisionLanguageModel, cfg: TrainConfig) -> None:
    """Freeze the parts whose rate is 0, and train the others: their weights, or with lora_rank adapters beside them.

    A frozen part gets no gradients, and a frozen encoder keeps no activations.
    """
    if cfg.lora_rank:
        torch.manual_seed(cfg.seed)
        parts = [part for part, rate in cfg.rates.items() if rate]
        adapt(model, cfg.lora_rank, cfg.lora_alpha, parts, cfg.lora_words)
        return
    for part, rate in cfg.rates.items():
        getattr(model, part).requires_grad_(rate > 0)


def empty_copy(cfg: VLMConfig, image_token_id: int, settings: TrainConfig) -> VisionLanguageModel:
    """A model as `freeze` makes it, on the meta device: its weights are still to be loaded."""
    with torch.device("meta"), torch.random.fork_rng():
        model = VisionLanguageModel(cfg, image_token_id)
        freeze(model, settings)
    return model


def make_optimizer(model: VisionLanguageModel, cfg: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) with weight decay on matrices only: not on norms, biases and embeddings.

    With cfg.optimizer "muon" the matrices of the Linear layers are trained by Muon, at MUON_RATE times the rate. The
    "rate" of a parameter group is that of its part of the model, a multiple of the step's learning rate.
    """
    embeddings = {id(model.decoder.token_embedding.weight), id(model.vision_encoder.patch_embedding.position_embedding)}
    muon = cfg.optimizer == "muon"
    groups: list[dict[str, Any]] = []
    for part, rate in cfg.rates.items():
        trained = [p for p in getattr(model, part).parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in embeddings]
        kernels = [p for p in trained if p.ndim > 2 and id(p) not in embeddings]
        others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
        linear = {"params": matrices, "rate": MUON_RATE * rate, "orthogonal": True}
        decayed = {"params": kernels if muon else matrices + kernels, "rate": rate, "orthogonal": False}
        groups += [group | {"weight_decay": cfg.weight_decay} for group in ([linear] if muon else []) + [decayed]]
        groups += [{"params": others, "weight_decay": 0.0, "rate": rate, "orthogonal": False}]
    groups = [group for group in groups if group["params"]]
    optimizer = (Muon if muon else torch.optim.AdamW)(groups, lr=cfg.lr, betas=(0.9, cfg.beta2), fused=True)
    for group in groups:  # checkpoints hold the state of unused parameters, too
        for p in group["params"]:
            optimizer.state[p] = _initial_state(p, group["orthogonal"])
    return optimizer


def _initial_state(p: torch.nn.Parameter, orthogonal: bool) -> dict[str, torch.Tensor]:
    if orthogonal:
        return {"momentum": torch.zeros_like(p)}
    return {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


@contextmanager
def accelerated(model: VisionLanguageModel, cfg: TrainConfig) -> Iterator[None]:
    """Compile the blocks, recompute their activations in the backward pass (Chen et al. 2016), or both, as cfg asks.

    On a CPU they compute with `cpu_ops`. At the end of the context the blocks are as they were.
    """
    changed = [*model.vision_encoder.blocks, *model.decoder.blocks] if cfg.compile or cfg.gradient_checkpointing else []
    for block in changed:
        forward = torch.compile(block.forward, dynamic=False) if cfg.compile else block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False) if cfg.gradient_checkpointing else forward
    try:
        with cpu_ops(model):
            yield
    finally:
        for block in changed:
            del block.forward
