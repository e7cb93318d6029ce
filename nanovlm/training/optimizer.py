"""AdamW or Muon for the three parts of the model, which of them are trained, and how their blocks are executed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.attention import attention
from models.lora import adapt
from models.vision_language_model import VisionLanguageModel
from nanovlm.device import fast_bfloat16
from nanovlm.training.config import PARTS, PROJECTOR, TrainConfig
from nanovlm.training.cpu_ops import ATTENTION, matmul_attention

MUON_LR_SCALE = 3.0  # Muon takes larger steps than AdamW; the other parameters keep AdamW's learning rate
MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients of the quintic polynomial
NEWTON_SCHULZ_STEPS = 5
MAX_STACKED = 2**22  # elements of small matrices orthogonalized together, which takes half the time on a CPU
RMS_OF_ADAMW = 0.2  # of an update of AdamW, which Muon's are scaled to (Liu et al. 2025, "Muon is scalable", 2.2)


def freeze(model: VisionLanguageModel, cfg: TrainConfig) -> None:
    """Freeze the parts of cfg.freeze, train the others: their weights, or with lora_rank adapters beside them."""
    in_full = cfg.trained_parts
    if cfg.lora_rank:
        torch.manual_seed(cfg.seed)
        in_full = [part for part in in_full if part == PROJECTOR and cfg.projector_lr]
        adapted = [part for part in cfg.trained_parts if part not in in_full]
        adapt(model, cfg.lora_rank, cfg.lora_alpha, adapted, cfg.train_embeddings)
    for part in PARTS.values():
        if part in in_full or not cfg.lora_rank:
            getattr(model, part).requires_grad_(part in in_full)


def make_optimizer(model: VisionLanguageModel, cfg: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) with weight decay on matrices only: not on norms, biases and embeddings.

    With cfg.optimizer "muon" matrices of Linear layers learn by Muon. A group's "lr_scale" multiplies the step's rate.
    """
    embeddings = {id(model.decoder.token_embedding.weight), id(model.vision_encoder.patch_embedding.position_embedding)}
    is_muon = cfg.optimizer == "muon"
    found: dict[Any, dict[str, Any]] = {}
    for part in cfg.trained_parts:
        part_scale = cfg.projector_lr / cfg.lr if part == PROJECTOR and cfg.projector_lr else 1.0
        for p in (p for p in getattr(model, part).parameters() if p.requires_grad):
            decay = cfg.weight_decay if p.ndim >= 2 and id(p) not in embeddings else 0.0
            orthogonal = is_muon and p.ndim == 2 and id(p) not in embeddings
            scale = part_scale * (MUON_LR_SCALE if orthogonal else 1.0)
            group: dict[str, Any] = {"params": [], "weight_decay": decay, "lr_scale": scale, "orthogonal": orthogonal}
            found.setdefault((part, decay, orthogonal), group)["params"].append(p)
    groups = list(found.values())
    optimizer = (Muon if is_muon else torch.optim.AdamW)(groups, lr=cfg.lr, betas=(0.9, cfg.beta2), fused=True)
    for group in groups:  # checkpoints hold the state of unused parameters, too
        names = ("momentum",) if group["orthogonal"] else ("exp_avg", "exp_avg_sq")
        for p in group["params"]:
            optimizer.state[p] = {name: torch.zeros_like(p) for name in names}
            if not group["orthogonal"]:
                optimizer.state[p]["step"] = torch.zeros((), device=p.device)
    return optimizer


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for groups with "orthogonal": True.

    It orthogonalizes the momentum of matrices; other groups learn by AdamW. For models that it trained from the start.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        groups = self.param_groups
        found_inf = getattr(self, "found_inf", None)  # GradScaler's, of float16 gradients
        for group in groups:
            if group["orthogonal"] and not (found_inf is not None and found_inf.item()):
                self._step_matrices(group)
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any]) -> None:
        updates: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}  # parameters and their updates by shape
        for p in group["params"]:
            if p.grad is not None:
                momentum = self.state[p]["momentum"].lerp_(p.grad, 1 - MOMENTUM)
                updates.setdefault(p.shape, []).append((p, p.grad.lerp(momentum, MOMENTUM)))  # Nesterov's
        for shape, pairs in updates.items():
            n = max(1, MAX_STACKED // shape.numel())
            for i in range(0, len(pairs), n):
                parameters, matrices = zip(*pairs[i : i + n])
                for p, update in zip(parameters, orthogonalized(torch.stack(matrices))):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * RMS_OF_ADAMW * max(shape) ** 0.5)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Nearly U V^T of the singular value decompositions U S V^T of matrices (B, M, N), in their dtype.

    A Newton-Schulz iteration, whose singular values end between about 0.7 and 1.2, in the dtype that is fastest here.
    """
    a, b, c = NEWTON_SCHULZ
    is_wide = matrices.size(1) <= matrices.size(2)
    x = matrices if is_wide else matrices.mT
    x = x.bfloat16() if fast_bfloat16(x.device) else x.float()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x if is_wide else x.mT).type_as(matrices)


@contextmanager
def accelerated(model: VisionLanguageModel, cfg: TrainConfig) -> Iterator[None]:
    """Compute a step faster on a CPU, by `matmul_attention`, and with less memory if cfg asks for it.

    The blocks' activations are then recomputed in the backward pass (Chen et al. 2016). Afterwards the modules are as
    the core has them: the kernels answer for no others. An attention that was edited is not replaced.
    """
    blocks: list[Any] = []
    if cfg.gradient_checkpointing:
        blocks = [*model.vision_encoder.blocks, *model.decoder.blocks]
    layers: list[Any] = []
    if model.device.type == "cpu" and not ATTENTION.difference():
        layers = [module for module in model.modules() if getattr(module, "attend", None) is attention]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for layer in layers:
        layer.attend = matmul_attention
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
        for layer in layers:
            layer.attend = attention
