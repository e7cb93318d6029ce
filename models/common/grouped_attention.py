"""`models.attention.attention` as matrix products: a second form for training on a CPU and for ONNX."""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, dropout_p: float = 0.0
) -> Tensor:
    """`attention` with one matrix product for all queries of a key's group, so that no key is repeated."""
    B, H, T, D = q.shape
    scores = (q * D**-0.5).reshape(B, k.size(1), -1, D) @ k.transpose(2, 3)
    if causal:
        mask = torch.ones(1, 1, T, k.size(2), dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        scores = (scores.view(B, H, T, -1) + bias).view(scores.shape)
    weights = F.dropout(scores.softmax(-1), dropout_p, training=dropout_p > 0)
    return (weights @ v).view(B, H, T, D)
