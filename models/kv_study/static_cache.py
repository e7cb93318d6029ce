"""A static cache: prefill and decode over caches of fixed capacity, for programs without branches.

The blocks are the model's own; StaticKV takes the place of their KVCache. A step writes its keys and values in place
into tensors that the caller owns, so one cache serves one batch of sequences. Masks are computed from start_pos, a
tensor. No branch depends on data, so that `static_export` can export the steps.
"""

import torch
from torch import Tensor, nn

from models.cache import KVCache
from models.common.errors import InputError
from models.kv_study.cross_attention import KVPair
from models.language_model import LanguageModel, rope_cos_sin


class StaticKV(KVCache):
    """A KVCache of constant length: `append` writes the tokens at positions (T,) int64, in place."""

    def __init__(self, key: Tensor, value: Tensor, positions: Tensor):
        super().__init__(key, value)
        self.positions = positions

    def append(self, key: Tensor, value: Tensor) -> "StaticKV":
        self.key.index_copy_(2, self.positions, key)
        self.value.index_copy_(2, self.positions, value)
        return self


class LanguageModelStep(nn.Module):
    """One step of the language model on a static cache: token ids or embeddings to the next token's logits."""

    def __init__(self, decoder: LanguageModel):
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor, attention_mask: Tensor, start_pos: Tensor, kv_cache: list[KVPair]) -> Tensor:
        """Compute x, ids (B, T) or embeddings (B, T, C), at position start_pos () int64: logits (B, vocabulary).

        attention_mask (B, capacity) is 0 at padding. kv_cache holds a pair of (B, n_kv_heads, capacity, head_dim)
        per block and is written in place.
        """
        if not x.is_floating_point():
            x = self.decoder.token_embedding(x)
        positions = start_pos + torch.arange(x.size(1), device=x.device)
        key = torch.arange(attention_mask.size(1), device=x.device)
        mask = (attention_mask[:, None, None] != 0) & (key <= positions[:, None]) | (key == positions[:, None])
        cos, sin = rope_cos_sin(mask.sum(-1) - 1, self.decoder.cfg)
        for block, (k, v) in zip(self.decoder.blocks, kv_cache):
            x, _ = block(x, cos, sin, mask, StaticKV(k, v, positions))
        return self.decoder.head(self.decoder.norm(x[:, -1]))


def language_model_cache(decoder: LanguageModel, batch: int, capacity: int) -> list[KVPair]:
    """Allocate a cache of capacity tokens for a batch of sequences; InputError beyond the model's positions."""
    cfg = decoder.cfg
    limit = cfg.lm_max_position_embeddings
    if capacity > limit:
        raise InputError(f"capacity={capacity} exceeds lm_max_position_embeddings={limit}")
    shape = (batch, cfg.lm_n_kv_heads, capacity, cfg.lm_head_dim)
    like = decoder.norm.weight
    return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in decoder.blocks]  # unwritten values times 0 are 0
