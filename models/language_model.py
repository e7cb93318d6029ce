"""A Llama-shaped decoder: rotary positions, grouped-query attention, one key/value cache per block.

The architecture is LLaMA's (Touvron et al. 2023) as SmolLM2 uses it; names are those of nanoVLM's checkpoints.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import attention
from models.cache import KVCache
from models.config import VLMConfig
from models.errors import InputError


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019; computed in float32 whatever the weights are."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).type_as(x)


def inverse_frequencies(head_dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """RoPE's angle per position for each pair of channels, (head_dim / 2,) float32 (Su et al. 2021)."""
    return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)


def rope_cos_sin(positions: Tensor, cfg: VLMConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, (..., head_dim) float32, of the angles at integer positions (...).

    Made anew for each call: a table in the model would lose precision with `model.bfloat16()`.
    """
    angles = positions.float()[..., None] * inverse_frequencies(cfg.lm_head_dim, cfg.lm_re_base, positions.device)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * cfg.lm_attn_scaling, angles.sin() * cfg.lm_attn_scaling


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel i of x (B, H, T, D) with channel i + D/2 by its angle; cos and sin (T, D) or (B, 1, T, D)."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).type_as(x)


PACK_STRIDE = 2**20  # from one sample of a packed row to the next, in attention_mask


def build_attention_mask(attention_mask: Tensor, n_new: int) -> Tensor:
    """Which tokens each of the last n_new may see: (B, 1, n_new, T) bool from a mask (B, T) over all of them.

    0 is padding, 1 a token. Higher numbers are branches: a token of branch n sees the ones and its own branch,
    so a picture (1) can be followed by many questions (2, 3, ...) that neither see nor shift each other. A row may
    hold several such samples: the second's numbers are larger by PACK_STRIDE, the third's by twice that.
    """
    of_query, of_key = attention_mask[:, None, -n_new:, None], attention_mask[:, None, None, :]
    position = torch.arange(attention_mask.size(1), device=attention_mask.device)
    query, key = position[-n_new:, None], position[None, :]
    trunk = of_query // PACK_STRIDE * PACK_STRIDE + 1
    seen = (key <= query) & (of_key != 0) & ((of_key == of_query) | (of_key == trunk))
    return seen | (key == query)  # padding sees itself, which keeps its softmax finite


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): n_heads queries share n_kv_heads keys and values."""

    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = cfg.lm_n_heads, cfg.lm_n_kv_heads, cfg.lm_head_dim
        self.q_proj = nn.Linear(cfg.lm_hidden_dim, self.n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.lm_hidden_dim, self.n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.lm_hidden_dim, self.n_kv_heads * self.head_dim, bias=False)
        self.out_proj = nn.Linear(self.n_heads * self.head_dim, cfg.lm_hidden_dim, bias=False)
        self.dropout = nn.Dropout(cfg.lm_dropout)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, block_kv_cache: KVCache | None = None
    ) -> tuple[Tensor, KVCache]:
        """Continue the cache with x (B, T, C); mask (B or 1, 1, T, T_past + T) bool, None for plain causal."""
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)

        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        kv = KVCache(k, v) if block_kv_cache is None else block_kv_cache.append(k, v)

        causal = mask is None and T > 1  # right only without a past, which is why chunks bring a mask
        y = attention(q, kv.key, kv.value, mask, causal, self.dropout.p if self.training else 0.0)
        return self.dropout(self.out_proj(y.transpose(1, 2).reshape(B, T, C))), kv


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.lm_hidden_dim, cfg.lm_inter_dim, bias=False)
        self.up_proj = nn.Linear(cfg.lm_hidden_dim, cfg.lm_inter_dim, bias=False)
        self.down_proj = nn.Linear(cfg.lm_inter_dim, cfg.lm_hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.norm1 = RMSNorm(cfg.lm_hidden_dim, cfg.lm_rms_eps)
        self.attn = Attention(cfg)
        self.norm2 = RMSNorm(cfg.lm_hidden_dim, cfg.lm_rms_eps)
        self.mlp = MLP(cfg)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, block_kv_cache: KVCache | None = None
    ) -> tuple[Tensor, KVCache]:
        y, block_kv_cache = self.attn(self.norm1(x), cos, sin, mask, block_kv_cache)
        x = x + y
        return x + self.mlp(self.norm2(x)), block_kv_cache


class LanguageModel(nn.Module):
    """Reads tokens (lm_use_tokens) and returns logits, or reads embeddings and returns hidden states."""

    blocks: list[Block]  # an nn.ModuleList, typed by its elements

    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.cfg = cfg
        self.token_embedding = nn.Embedding(cfg.lm_vocab_size, cfg.lm_hidden_dim)
        self.blocks = cast(list[Block], nn.ModuleList(Block(cfg) for _ in range(cfg.lm_n_blocks)))
        self.norm = RMSNorm(cfg.lm_hidden_dim, cfg.lm_rms_eps)
        self.head = nn.Linear(cfg.lm_hidden_dim, cfg.lm_vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter, if the config says so."""
        if self.cfg.lm_tie_weights:
            self.head.weight = self.token_embedding.weight

    @torch.no_grad()
    def pack_projections(self) -> None:
        """Store each block's q, k and v adjacent in memory, and its gate and up, so that one product can read each.

        Only the place in memory changes. `InferenceModel` decodes faster with packed weights, above all in bfloat16.
        """
        for block in self.blocks:
            for linears in (
                (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj),
                (block.mlp.gate_proj, block.mlp.up_proj),
            ):
                for name in dict(linears[0].named_parameters()):
                    parameters = [linear.get_parameter(name) for linear in linears]
                    parts = torch.cat([p.detach() for p in parameters]).split([len(p) for p in parameters])
                    for parameter, part in zip(parameters, parts):
                        parameter.data = part

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        kv_cache: list[KVCache] | None = None,
        start_pos: int = 0,
        use_cache: bool = True,
    ) -> tuple[Tensor, list[KVCache]]:
        """Read x, ids (B, T) or embeddings (B, T, C), from start_pos on; also return each block's longer cache.

        attention_mask, (B, T_past + T) integers, is explained at `build_attention_mask`; with it, a token's position is
        the number of tokens that it sees before itself, so padding shifts nothing. start_pos must be the length of
        the cache. use_cache=False returns no caches and keeps none alive.
        """
        T, past = x.size(1), kv_cache[0].length if kv_cache else 0
        if start_pos != past:
            raise InputError(f"start_pos={start_pos}, but the cache holds {past} tokens")
        if attention_mask is not None and attention_mask.size(1) != past + T:
            raise InputError(f"attention_mask covers {attention_mask.size(1)} tokens, not {past} cached + {T} new")
        if past + T > self.cfg.lm_max_position_embeddings:
            limit = self.cfg.lm_max_position_embeddings
            raise InputError(f"{past + T} tokens exceed lm_max_position_embeddings={limit}; shorten the prompt")
        if self.cfg.lm_use_tokens:
            x = self.token_embedding(x)

        mask, positions = None, torch.arange(past, past + T, device=x.device)
        if attention_mask is not None:
            mask = build_attention_mask(attention_mask, T)
            positions = mask.sum(-1) - 1
        elif past and T > 1:
            mask = torch.ones(1, 1, T, past + T, dtype=torch.bool, device=x.device).tril(past)
        cos, sin = rope_cos_sin(positions, self.cfg)

        caches = []
        for i, block in enumerate(self.blocks):
            x, block_kv_cache = block(x, cos, sin, mask, kv_cache[i] if kv_cache else None)
            if use_cache:
                caches.append(block_kv_cache)
        x = self.norm(x)
        return (self.head(x) if self.cfg.lm_use_tokens else x), caches
