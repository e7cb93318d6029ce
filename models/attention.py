"""Scaled dot-product attention (Vaswani et al. 2017) with grouped queries."""

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
