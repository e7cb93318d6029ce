"""A decoder block with cross-attention, whose keys and values are computed once per image.

Architecture and parameter names are those of openai/whisper's model.py (Radford et al. 2022).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from models.attention import attention
from models.cache import KVCache

KVPair = tuple[Tensor, Tensor]  # keys and values, each (B, n_head, S, D)
HookedKV = Mapping[nn.Module, Tensor]  # outputs (B, S, C) of key and value projections, by module


class MultiHeadAttention(nn.Module):
    """Whisper's attention. Keys and values are arguments of `attend`."""

    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def split_heads(self, x: Tensor) -> Tensor:
        """View x (N, S, C) as (N, n_head, S, D)."""
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def project_kv(self, xa: Tensor, kv_cache: HookedKV | None = None) -> KVPair:
        """Keys and values of xa (N, S, C), each (N, n_head, S, D); read from kv_cache if they are there."""
        if kv_cache and self.key in kv_cache:
            return self.split_heads(kv_cache[self.key]), self.split_heads(kv_cache[self.value])
        return self.split_heads(self.key(xa)), self.split_heads(self.value(xa))

    def attend(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from x (B, T, C) to given k and v; mask (1, 1, T, S) bool is True where a query may attend."""
        q = self.query(x).unflatten(-1, (self.n_head, -1))
        # fold the sequences that share an image into the time dimension, so its keys are not repeated for each
        q = q.reshape(k.size(0), -1, *q.shape[2:]).transpose(1, 2)
        return self.out(attention(q, k, v, mask).transpose(1, 2).reshape(x.shape))


def causal_mask(n_new: int, n_keys: int, device: torch.device) -> Tensor | None:
    """Causal mask of the last n_new of n_keys tokens, (1, 1, n_new, n_keys) bool; None where all keys are visible."""
    if n_new == 1:
        return None
    return torch.ones(1, 1, n_new, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_new)


class EncoderBlock(nn.Module):
    """Pre-norm block of the audio encoder: attention without a mask, and an MLP."""

    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.attn = MultiHeadAttention(n_state, n_head)
        self.attn_ln = nn.LayerNorm(n_state)
        self.mlp = nn.Sequential(nn.Linear(n_state, 4 * n_state), nn.GELU(), nn.Linear(4 * n_state, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn_ln(x)
        x = x + self.attn.attend(y, *self.attn.project_kv(y))
        return x + self.mlp(self.mlp_ln(x))


class Block(EncoderBlock):
    """Pre-norm block of the decoder: self-attention, cross-attention and an MLP."""

    def __init__(self, n_state: int, n_head: int):
        super().__init__(n_state, n_head)
        self.cross_attn = MultiHeadAttention(n_state, n_head)
        self.cross_attn_ln = nn.LayerNorm(n_state)

    def forward(  # type: ignore[override]  # reads and extends caches
        self, x: Tensor, cross_kv: KVPair, self_kv: KVCache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """Compute x (B, T, C) behind the cached tokens self_kv, with the image's keys and values cross_kv.

        Returns x and the extended cache. Without a mask, the last T keys are those of x, and attention is causal.
        """
        y = self.attn_ln(x)
        k, v = self.attn.project_kv(y)  # with the past, if hooks put it there
        self_kv = KVCache(k, v) if self_kv is None else self_kv.append(k, v)
        mask = causal_mask(x.size(1), self_kv.length, x.device) if mask is None else mask
        x = x + self.attn.attend(y, self_kv.key, self_kv.value, mask)
        x = x + self.cross_attn.attend(self.cross_attn_ln(x), *cross_kv)
        return x + self.mlp(self.mlp_ln(x)), self_kv
