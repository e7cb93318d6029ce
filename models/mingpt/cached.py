"""minGPT with a key/value cache: GPT_kv keeps `[k, v]` per block and computes only the tokens that the cache lacks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.cache import KVCache
from models.mingpt.model import GPT, Block, CausalSelfAttention, cross_entropy, next_token

Cache = list[list[Tensor]]  # [k, v] per block, each (B, T, C)
EmptyCache = list[None]  # [None] * n_layer


class KVList(list):
    """A cache [k, v], each (B, T, C): those of a KVCache of the core, which appends in place."""

    def __init__(self, kv: KVCache):
        self.kv = kv
        super().__init__((kv.key, kv.value))


def append_kv(kv_cache: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    """Return kv_cache extended by k and v (B, T_new, C); the given cache keeps its value and can be continued again.

    Tokens are written in place where there is space behind this cache, see `KVCache`; else the history is copied.
    """
    past_k, past_v = kv_cache
    kv = kv_cache.kv if isinstance(kv_cache, KVList) else KVCache(past_k, past_v)
    if past_k is not kv.key or past_v is not kv.value:  # a caller has replaced the list's items
        kv = KVCache(past_k, past_v)
    return KVList(kv.append(k, v))


class CausalSelfAttention_kv(CausalSelfAttention):
    """CausalSelfAttention that takes and returns a cache of keys and values."""

    def forward(  # type: ignore[override]  # returns the cache beside the output
        self, x: Tensor, kv_cache: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Attend from x (B, T, C) to the cached tokens and x; kv_cache is [k, v], each (B, T_past, C).

        Returns the output (B, T, C) and the cache of T_past + T tokens.
        """
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        kv_cache = [k, v] if kv_cache is None else append_kv(kv_cache, k, v)
        k, v = kv_cache
        S = k.size(1)
        # SDPA aligns is_causal to the top left, which is wrong when there is a past
        mask = self.bias[:, :, S - T : S, :S] == 1 if S > T > 1 else None
        p = self.attn_dropout.p if self.training else 0.0
        q, k, v = self.split_heads(q), self.split_heads(k), self.split_heads(v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=S == T)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y)), kv_cache


class Block_kv(Block):
    """Block that passes a cache of keys and values through its attention."""

    attention_class = CausalSelfAttention_kv

    def forward(  # type: ignore[override]  # returns the cache beside the output
        self, x: Tensor, kv_cache: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        y, kv_cache = self.attn(self.ln_1(x), kv_cache)
        x = x + y
        return x + self.mlp(self.ln_2(x)), kv_cache


class GPT_kv(GPT):
    """GPT with a key/value cache: computes each token once."""

    block_class = Block_kv

    def hidden_states(
        self, idx: Tensor, kv_cache: Cache | EmptyCache | None = None, compute_first: bool = False
    ) -> tuple[Tensor, Cache]:
        """Compute the tokens of idx (B, T) that kv_cache lacks: hidden states (B, T_new, C) and the cache of all T."""
        cached = None if compute_first else self._check_cache(idx, kv_cache)
        x = self.embed(idx, cached[0][0].size(1) if cached else 0)
        new_cache = []
        for i, block in enumerate(self.transformer.h):
            x, block_cache = block(x, cached[i] if cached else None)
            new_cache.append(block_cache)
        return self.transformer.ln_f(x), new_cache

    def _check_cache(self, idx: Tensor, kv_cache: Cache | EmptyCache | None) -> Cache | None:
        """Return kv_cache, None if it is empty; ValueError if it does not belong to a proper prefix of idx (B, T)."""
        if kv_cache is None:
            return None
        if len(kv_cache) != self.n_layer:
            raise ValueError(
                f"kv_cache has {len(kv_cache)} blocks, but the model {self.n_layer}; [None] * n_layer is an empty cache"
            )
        filled = [block for block in kv_cache if block is not None]
        if not filled:
            return None
        if len(filled) < self.n_layer:
            raise ValueError(f"kv_cache is empty for some of {self.n_layer} blocks only; fill all of them or none")
        B, past, _ = filled[0][0].shape
        if len(idx) != B or idx.size(1) <= past:
            raise ValueError(
                f"idx is {tuple(idx.shape)}, but the cache holds {(B, past)} tokens; "
                "pass the whole sequence, at least one token longer than the cache"
            )
        return filled

    def forward(  # type: ignore[override]  # returns the cache beside logits and loss when one is given
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        kv_cache: Cache | EmptyCache | None = None,
        compute_first: bool = False,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Cache]:
        """Return logits (B, T_new, vocab_size) of the new tokens and their loss given targets (B, T).

        idx (B, T) is the whole sequence. Without kv_cache all of it is computed. With one, [k, v] per block, only the
        tokens that it lacks are, and the new cache is returned, too; it can be continued again. [None] * n_layer is an
        empty cache, and compute_first ignores what a cache holds.
        """
        x, new_cache = self.hidden_states(idx, kv_cache, compute_first)
        logits = self.lm_head(x)
        loss = cross_entropy(logits, None if targets is None else targets[:, -x.size(1) :])
        return (logits, loss) if kv_cache is None else (logits, loss, new_cache)

    @torch.no_grad()
    def generate_kv(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        do_sample: bool = False,
        top_k: int | None = None,
    ) -> Tensor:
        """Return what `generate` returns, but compute each token once as long as block_size tokens suffice."""
        kv_cache: Cache | None = None
        for _ in range(max_new_tokens):
            shifted = idx.size(1) > self.block_size  # every token's position changes, so cached keys are wrong
            x, kv_cache = self.hidden_states(idx[:, -self.block_size :], kv_cache, compute_first=shifted)
            logits = self.lm_head(x[:, -1])  # also after the prompt only the last position is needed
            idx = torch.cat((idx, next_token(logits, temperature, do_sample, top_k)), dim=1)
        return idx
