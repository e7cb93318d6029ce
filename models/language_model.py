"""The Llama decoder: rotary position embeddings, grouped-query attention, one KV cache per block.

The architecture is LLaMA's (Touvron et al. 2023) as in SmolLM2; module names are those of nanoVLM's checkpoints.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import attention
from models.cache import KVCache
from models.common.errors import InputError
from models.config import VLMConfig


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019), computed in float32 for weights of any dtype."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).type_as(x)


def inverse_frequencies(head_dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """RoPE's frequencies (radians per position) of the channel pairs, (head_dim / 2,) float32 (Su et al. 2021)."""
    return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)


def rope_cos_sin(positions: Tensor, cfg: VLMConfig, frequencies: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin, (..., head_dim) float32, of the rotation at integer positions (...).

    Computed for each call: a buffer in the model would lose precision with `model.bfloat16()`.
    """
    if frequencies is None:
        frequencies = inverse_frequencies(cfg.lm_head_dim, cfg.lm_re_base, positions.device)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * cfg.lm_attn_scaling, angles.sin() * cfg.lm_attn_scaling


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + D/2 of x (B, H, T, D); cos and sin (T, D) or (B, 1, T, D)."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).type_as(x)


PACK_STRIDE = 2**20  # in attention_mask, between consecutive samples of a packed row


def build_attention_mask(attention_mask: Tensor, n_new: int) -> Tensor:
    """Which positions each of the last n_new may attend to: (B, 1, n_new, T) bool from a mask (B, T) over all.

    0 is padding, 1 a token of the shared prefix. Higher numbers are continuations: a token of continuation n attends
    to the prefix and to its own continuation, so one image (1) can have many questions (2, 3, ...) that do not affect
    each other. A row may pack several samples: numbers of the second are larger by PACK_STRIDE, of the third by twice
    that.
    """
    of_query = attention_mask[:, None, -n_new:, None]
    of_key = attention_mask[:, None, None, :]
    position = torch.arange(attention_mask.size(1), device=attention_mask.device)
    query = position[-n_new:, None]
    key = position[None, :]
    prefix = of_query // PACK_STRIDE * PACK_STRIDE + 1
    visible = (key <= query) & (of_key != 0) & ((of_key == of_query) | (of_key == prefix))
    return visible | (key == query)  # padding attends to itself, which keeps its softmax finite


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): n_heads queries share n_kv_heads keys and values."""

    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.n_heads = cfg.lm_n_heads
        self.n_kv_heads = cfg.lm_n_kv_heads
        self.head_dim = cfg.lm_head_dim
        self.q_proj = nn.Linear(cfg.lm_hidden_dim, self.n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.lm_hidden_dim, self.n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.lm_hidden_dim, self.n_kv_heads * self.head_dim, bias=False)
        self.out_proj = nn.Linear(self.n_heads * self.head_dim, cfg.lm_hidden_dim, bias=False)
        self.dropout = nn.Dropout(cfg.lm_dropout)
        self.attend = attention  # an add-on may set another function of these arguments

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, block_kv_cache: KVCache | None = None
    ) -> tuple[Tensor, KVCache]:
        """Attend from x (B, T, C) to the cache and x; mask (B or 1, 1, T, T_past + T) bool, None for causal."""
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)

        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        kv = KVCache(k, v) if block_kv_cache is None else block_kv_cache.append(k, v)

        causal = mask is None and T > 1  # correct without a past only; with one, several tokens come with a mask
        y = self.attend(q, kv.key, kv.value, mask, causal, self.dropout.p if self.training else 0.0)
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
        """The arguments of `Attention.forward`."""
        y, block_kv_cache = self.attn(self.norm1(x), cos, sin, mask, block_kv_cache)
        x = x + y
        return x + self.mlp(self.norm2(x)), block_kv_cache


class LanguageModel(nn.Module):
    """The decoder: from embeddings to hidden states, or with lm_use_tokens from ids to logits."""

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
        """Make head and embedding one parameter if cfg.lm_tie_weights."""
        if self.cfg.lm_tie_weights:
            self.head.weight = self.token_embedding.weight

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        kv_cache: list[KVCache] | list[None] | None = None,
        start_pos: int = 0,
        use_cache: bool = True,
    ) -> tuple[Tensor, list[KVCache]]:
        """Process x, ids (B, T) or embeddings (B, T, C), from position start_pos on; also return each block's cache.

        attention_mask (B, T_past + T), integers, is that of `build_attention_mask`. With it, a token's position is the
        number of tokens before it that it attends to, so padding shifts nothing. kv_cache has one cache per block; None
        or [None] * lm_n_blocks is an empty one. start_pos must be the cache's length. use_cache=False returns no
        caches. Raises InputError if lengths do not match or exceed the model's positions.
        """
        kv_cache = kv_cache or [None] * len(self.blocks)
        if len(kv_cache) != len(self.blocks):
            raise InputError(f"kv_cache has {len(kv_cache)} blocks, but the model {len(self.blocks)}")
        lengths = {0 if cache is None else cache.length for cache in kv_cache}
        if len(lengths) > 1:
            raise InputError(f"the blocks of kv_cache hold different numbers of tokens: {sorted(lengths)}")
        T = x.size(1)
        past = lengths.pop()
        if start_pos != past:
            raise InputError(f"start_pos={start_pos}, but the cache holds {past} tokens")
        if attention_mask is not None and attention_mask.size(1) != past + T:
            raise InputError(f"attention_mask covers {attention_mask.size(1)} tokens, not {past} cached + {T} new")
        if past + T > self.cfg.lm_max_position_embeddings:
            limit = self.cfg.lm_max_position_embeddings
            raise InputError(f"{past + T} tokens exceed lm_max_position_embeddings={limit}; shorten the prompt")
        if self.cfg.lm_use_tokens:
            x = self.token_embedding(x)

        mask = None
        positions = torch.arange(past, past + T, device=x.device)
        if attention_mask is not None:
            mask = build_attention_mask(attention_mask, T)
            positions = mask.sum(-1) - 1
        elif past and T > 1:
            mask = torch.ones(1, 1, T, past + T, dtype=torch.bool, device=x.device).tril(past)
        cos, sin = rope_cos_sin(positions, self.cfg)

        new_cache = []
        for block, block_kv_cache in zip(self.blocks, kv_cache):
            x, block_kv_cache = block(x, cos, sin, mask, block_kv_cache)
            if use_cache:
                new_cache.append(block_kv_cache)
        x = self.norm(x)
        return (self.head(x) if self.cfg.lm_use_tokens else x), new_cache
