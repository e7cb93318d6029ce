"""Scaled dot-product attention (Vaswani et al. 2017) with grouped queries, by the fastest of four implementations."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_MATH_KEYS = 512  # for training; beyond, storing the scores of every pair costs more than it saves
MIN_CHUNKED_KEYS = 32  # fewer gain nothing from chunks
CHUNK_QUERIES = 256  # whose scores, of all heads, fit the processor's cache
MAX_FLOAT32_KEYS = 256  # up to here a softmax, or attention of one token, is faster in float32 than in bfloat16


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, dropout_p: float = 0.0
) -> Tensor:
    """Queries q (B, H, T, D) on keys and values k, v (B, H_kv, S, D), each shared by H / H_kv heads: (B, H, T, D).

    mask (B or 1, 1, T, S) is True where a query may attend; a mask of q's dtype is added to the scores. causal, allowed
    without mask and for T == S, lets each query attend to its own and earlier positions. k and v are not repeated for
    the heads that share them.
    """
    B, H, T, D = q.shape
    half = q.dtype == torch.bfloat16 and q.device.type == "cpu" and not needs_grad_or_graph()
    half = half and not sdpa_is_fast_in_bfloat16()
    if T == 1 and k.size(1) < H and _sdpa_shares_keys(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, enable_gqa=True)
    if T == 1:  # heads of a group take the place of time, so each key is read once per group
        q = q.view(B, k.size(1), -1, D)
        if B > 1 and half and k.size(2) < MAX_FLOAT32_KEYS:  # SDPA takes twice as long on AMD's CPUs
            wide = _math(q.float(), k.float(), v.float(), mask, False, dropout_p)
            return wide.type_as(q).reshape(B, H, 1, D)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p).reshape(B, H, 1, D)
    if q.requires_grad and q.device.type == "cpu" and k.size(2) <= MAX_MATH_KEYS:
        return _math(q, k, v, mask, causal, dropout_p)
    if half and k.size(2) >= MIN_CHUNKED_KEYS:
        return _chunked(q, k, v, mask, causal, dropout_p)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal, enable_gqa=k.size(1) != H
    )


@cache
def sdpa_is_fast_in_bfloat16() -> bool:
    """Whether SDPA multiplies in tiles (AMX) on this CPU: it then takes half the time of `_chunked`, at any length."""
    capabilities: dict = getattr(torch.cpu, "get_capabilities", dict)()  # not in torch 2.6
    return bool(capabilities.get("amx_bf16"))


def _sdpa_shares_keys(q: Tensor) -> bool:
    """Whether SDPA with grouped queries is fastest for one token: of several, it packs the keys for tiles (AMX)."""
    few = q.dtype == torch.bfloat16 and q.device.type == "cpu" and not needs_grad_or_graph()
    return few and sdpa_is_fast_in_bfloat16()


def needs_grad_or_graph() -> bool:
    """Whether autograd or a compiler records what is computed."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def _chunked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float) -> Tensor:
    """`_math` on chunks of queries: on CPUs without AMX, SDPA reaches a fifth of the speed of bfloat16 products."""
    T, S, parts = q.size(2), k.size(2), []
    k, v = k.contiguous(), v.contiguous()  # once, not for each product
    for start in range(0, T, CHUNK_QUERIES):
        stop = min(start + CHUNK_QUERIES, T)
        visible = stop if causal else S  # later keys are not computed
        part = None if mask is None else mask[:, :, start:stop]
        parts.append(_math(q[:, :, start:stop], k[:, :, :visible], v[:, :, :visible], part, causal, dropout_p))
    return torch.cat(parts, dim=2)


def _math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float) -> Tensor:
    """The definition as matrix products: on CPUs its backward pass is 3 to 5 times faster than SDPA's.

    causal lets the last query attend to every key, the one before it to all but one, and so on.
    """
    (B, H, T, D), (_, groups, S, _) = q.shape, k.shape
    scores = (q * D**-0.5).reshape(B * groups, -1, D) @ k.reshape(B * groups, S, D).transpose(1, 2)
    if causal:
        scores.view(B, groups, -1, T, S)[..., S - T :] += q.new_full((T, T), float("-inf")).triu(1)
    if mask is not None:
        bias = mask.to(scores.dtype)
        if mask.dtype == torch.bool:
            bias = torch.zeros_like(bias).masked_fill_(~mask, float("-inf"))
        scores = (scores.view(B, groups, -1, T, S) + bias[:, None]).view(B * groups, -1, S)
    wide = torch.float32 if S < MAX_FLOAT32_KEYS and not needs_grad_or_graph() else None  # same values
    weights = F.dropout(scores.softmax(-1, dtype=wide).type_as(v), dropout_p)
    return (weights @ v.reshape(B * groups, S, D)).view(B, H, T, D)
