"""Sharing: caches that are small because heads or blocks read the same numbers, as the model was trained to do.

Grouped queries share keys and values among heads (`lm_n_kv_heads`; MQA with 1). Two designs go further:

- `CrossLayerModel`, CLA (Brandon et al. 2024): every second block reads the keys and values of the block before it and
  has no projections for its own, so half the blocks have a cache.
- `LatentAttention`, MLA (DeepSeek-V2 2024): a token caches one latent vector, from which all heads' keys and values are
  projected, and one rotary key that all heads share. The projections are absorbed: queries are moved into the latent
  space and attend to the latent vectors themselves, so keys and values of the heads never exist.
"""

import torch
from torch import Tensor, nn

from models.attention import attention
from models.cache import KVCache
from models.config import VLMConfig
from models.kv_study.cross_attention import causal_mask
from models.language_model import Attention, LanguageModel, apply_rope, rope_cos_sin


class LatentAttention(nn.Module):
    """Takes the place of `Attention`; its cache's key (B, 1, T, latent_dim + head_dim) holds all, its value nothing."""

    def __init__(self, cfg: VLMConfig, latent_dim: int):
        super().__init__()
        self.n_heads = cfg.lm_n_heads
        self.head_dim = cfg.lm_head_dim
        self.latent_dim = latent_dim
        self.q_proj = nn.Linear(cfg.lm_hidden_dim, self.n_heads * 2 * self.head_dim, bias=False)  # content, rotary
        self.down_proj = nn.Linear(cfg.lm_hidden_dim, latent_dim + self.head_dim, bias=False)
        up = (self.n_heads, self.head_dim, latent_dim)
        self.k_up, self.v_up = (nn.Parameter(torch.randn(up) * latent_dim**-0.5) for _ in range(2))
        self.out_proj = nn.Linear(self.n_heads * self.head_dim, cfg.lm_hidden_dim, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, block_kv_cache: KVCache | None = None
    ) -> tuple[Tensor, KVCache]:
        """The arguments of `Attention.forward`."""
        q = self.q_proj(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        content, rotary = q.split(self.head_dim, -1)
        latent, key = self.down_proj(x)[:, None].split([self.latent_dim, self.head_dim], -1)
        key = torch.cat([latent, apply_rope(key, cos, sin)], -1)
        kv = KVCache(key, key[..., :0]) if block_kv_cache is None else block_kv_cache.append(key, key[..., :0])

        q = torch.cat([content @ self.k_up, apply_rope(rotary, cos, sin)], -1)
        q = q * (q.size(-1) / (2 * self.head_dim)) ** 0.5  # attention divides by the root of its own size
        y = attention(q, kv.key, kv.key[..., : self.latent_dim], mask, mask is None and x.size(1) > 1) @ self.v_up.mT
        return self.out_proj(y.transpose(1, 2).flatten(2)), kv


class SharedAttention(Attention):
    """Queries of its own on the cache of the block before it, which holds the new tokens already."""

    def __init__(self, cfg: VLMConfig):
        super().__init__(cfg)
        del self.k_proj, self.v_proj

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, block_kv_cache: KVCache | None = None
    ) -> tuple[Tensor, KVCache]:
        assert block_kv_cache is not None
        q = self.q_proj(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        y = self.attend(apply_rope(q, cos, sin), block_kv_cache.key, block_kv_cache.value, mask)
        return self.out_proj(y.transpose(1, 2).flatten(2)), block_kv_cache


class CrossLayerModel(LanguageModel):
    """A language model of ids, without padding, whose blocks 1, 3, ... share the caches of blocks 0, 2, ..."""

    def __init__(self, cfg: VLMConfig):
        super().__init__(cfg)
        for block in self.blocks[1::2]:
            block.attn = SharedAttention(cfg)

    def forward(self, x, attention_mask=None, kv_cache=None, start_pos=0, use_cache=True):
        """`LanguageModel.forward`; kv_cache has one cache for two blocks."""
        T = x.size(1)
        cos, sin = rope_cos_sin(torch.arange(start_pos, start_pos + T, device=x.device), self.cfg)
        mask = causal_mask(T, start_pos + T, x.device)
        x = self.token_embedding(x)
        caches: list[KVCache] = []
        for i, block in enumerate(self.blocks):
            past = caches[-1] if i % 2 else kv_cache[i // 2] if kv_cache else None
            x, kv = block(x, cos, sin, mask, past)
            if i % 2 == 0:
                caches.append(kv)
        return self.head(self.norm(x)), caches
