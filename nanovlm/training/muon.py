"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum with orthogonalized matrices.

It is for models that are trained from scratch, and for fine-tuning models that it trained.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients of the quintic polynomial
NEWTON_SCHULZ_STEPS = 5
RMS_OF_ADAMW = 0.2  # of an update of AdamW, which Muon's are scaled to (Liu et al. 2025, "Muon is scalable", 2.2)


class Muon(torch.optim.AdamW):
    """Muon for the parameter groups with "orthogonal": True, all of whose parameters are matrices; AdamW for others."""

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
        for p in group["params"]:
            if p.grad is None:
                continue
            momentum = self.state[p]["momentum"].lerp_(p.grad, 1 - MOMENTUM)
            update = orthogonalized(p.grad.lerp(momentum, MOMENTUM))  # Nesterov's
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(update, alpha=-group["lr"] * RMS_OF_ADAMW * max(p.shape) ** 0.5)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Nearly U V^T of the singular value decomposition U S V^T of a matrix (M, N), in its dtype.

    A Newton-Schulz iteration in bfloat16, whose singular values end between about 0.7 and 1.2.
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrix.size(0) <= matrix.size(1)
    x = (matrix if wide else matrix.T).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x if wide else x.T).type_as(matrix)
