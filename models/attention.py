"""Scaled dot-product attention (Vaswani et al. 2017) with grouped queries."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, dropout_p: float = 0.0
) -> Tensor:
    """Queries q (B, H, T, D) on keys and values k, v (B, H_kv, S, D), each shared by H / H_kv heads: (B, H, T, D).

    mask (B or 1, 1, T, S) is True where a query may attend. causal, allowed without mask and for T == S, lets each
    query attend to its own and earlier positions.
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal, enable_gqa=k.size(1) != q.size(1)
    )


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, dropout_p: float = 0.0
) -> Tensor:
    """`attention` as matrix products, one for all queries of a key's group; for training on CPUs and for ONNX."""
    B, H, T, D = q.shape
    scores = (q * D**-0.5).reshape(B, k.size(1), -1, D) @ k.transpose(2, 3)
    if causal:
        mask = torch.ones(1, 1, T, k.size(2), dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        scores = (scores.view(B, H, T, -1) + bias).view(scores.shape)
    weights = F.dropout(scores.softmax(-1), dropout_p, training=dropout_p > 0)
    return (weights @ v).view(B, H, T, D)
