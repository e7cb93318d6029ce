"""Whisper's text decoder (Radford et al. 2022), whose weights load unchanged, and what it caches."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.cache import KVCache
from models.common.errors import InputError
from models.kv_study.cross_attention import Block, HookedKV, KVPair


@dataclass(frozen=True)
class TextPrefillState:
    """Cached keys and values, one entry per block; a value that can be continued many times."""

    cross_kv: list[KVPair]  # of N images, computed once
    self_kv: list[KVCache] | None = None  # of B = N * n sequences; the n sequences of an image are adjacent

    @property
    def length(self) -> int:
        """Number of tokens cached."""
        return self.self_kv[0].length if self.self_kv else 0

    def rows(self, index: Tensor) -> "TextPrefillState":
        """Select sequences by index (B_new,), as beam search does; each must stay with its image, which is shared."""
        return TextPrefillState(self.cross_kv, [kv.rows(index) for kv in self.self_kv or []])


class TextDecoder(nn.Module):
    """Whisper's decoder: learned positions, pre-norm blocks, the output head tied to the token embedding."""

    blocks: list[Block]  # an nn.ModuleList, typed by its elements

    def __init__(self, n_vocab: int, n_ctx: int, n_state: int, n_head: int, n_layer: int):
        super().__init__()
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(n_ctx, n_state))
        self.blocks = cast(list[Block], nn.ModuleList(Block(n_state, n_head) for _ in range(n_layer)))
        self.ln = nn.LayerNorm(n_state)
        nn.init.normal_(self.token_embedding.weight, std=0.02)

    def forward(self, x: Tensor, xa: Tensor, start_pos: int = 0, kv_cache: HookedKV | None = None) -> Tensor:
        """Logits (B, T, n_vocab) float32 of ids x (B, T) from position start_pos on, about encoded inputs xa (N, S, C).

        kv_cache is that of `Whisper.install_kv_cache_hooks`, whose tokens come before x.
        """
        if kv_cache:
            start_pos = kv_cache[self.blocks[0].attn.key].size(1)
        x, _ = self.forward_cached(x, TextPrefillState(self.project_cross_kv(xa, kv_cache)), start_pos)
        return self.logits(x)

    def project_cross_kv(self, xa: Tensor, kv_cache: HookedKV | None = None) -> list[KVPair]:
        """Each block's cross-attention keys and values of the encoded images xa (N, S, n_state)."""
        return [block.cross_attn.project_kv(xa, kv_cache) for block in self.blocks]

    def forward_cached(self, x: Tensor, state: TextPrefillState, start_pos: int = 0) -> tuple[Tensor, TextPrefillState]:
        """Continue state by ids x (B, T): hidden states (B, T, C), which `logits` takes, and the extended state."""
        positions = self.positions(state.length + start_pos, x.size(1))
        x = self.token_embedding(x) + self.positional_embedding[positions]
        extended = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, state.cross_kv[i], state.self_kv[i] if state.self_kv else None)
            extended.append(kv)
        return x, TextPrefillState(state.cross_kv, extended)

    def positions(self, start: int, n: int) -> Tensor:
        """Positions start ... start + n - 1, (n,) int64; InputError beyond n_ctx."""
        n_ctx = len(self.positional_embedding)
        if start + n > n_ctx:
            raise InputError(f"{start + n} tokens exceed the decoder's n_ctx={n_ctx}; shorten the prompt or the answer")
        return torch.arange(start, start + n, device=self.positional_embedding.device)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (..., C) to float32 logits (..., n_vocab)."""
        return F.linear(self.ln(x), self.token_embedding.weight).float()
