"""Eviction: keep the tokens of a cache that a policy chooses, by the attention they have received, and forget the rest.

A policy is a function `keep(scores, n)`, for each head of a block: from scores (B, n_kv_heads, S), the attention that
each cached token received, to the indices (B, n_kv_heads, n) of the tokens that stay, in order. Keys stay rotated by
their positions in the text, so the output is as if the other tokens were masked.

- "heavy hitters" is H2O (Zhang et al. 2023): half the places for the newest tokens, half for the highest scores so far.
- "SnapKV" is its paper's (Li et al. 2024): the prompt's last queries choose once, after the prefill; neighbors of what
  they attend to are kept with it, and so is all that is generated later.
- "sinks and window" is StreamingLLM's (Xiao et al. 2024): the first tokens and the newest, whatever the scores.
- "random" keeps random tokens: the baseline that a policy must beat.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import attention
from models.common.errors import InputError
from models.language_model import LanguageModel

SINKS = 4  # tokens
SNAP_QUERIES = 8
SNAP_KERNEL = 5


@dataclass(frozen=True)
class Policy:
    """Which tokens stay, how many of a step's last queries count in the scores (None: all), and when it chooses."""

    keep: Callable[[Tensor, int], Tensor]
    queries: int | None = None
    once: bool = False  # after the first step alone, or after every step


def highest(scores: Tensor, n: int, newest: int) -> Tensor:
    """Indices (B, H, n), in order, of the newest tokens and of the highest scores (B, H, S) among the others."""
    at = torch.arange(scores.size(-1), device=scores.device)
    return scores.masked_fill(at >= len(at) - newest, torch.inf).topk(n).indices.sort().values


def snap(scores: Tensor, n: int) -> Tensor:
    return highest(F.max_pool1d(scores, SNAP_KERNEL, 1, SNAP_KERNEL // 2), n, min(SNAP_QUERIES, n - n // 2))


def window(scores: Tensor, n: int) -> Tensor:
    at = torch.arange(scores.size(-1), device=scores.device)
    sinks = min(SINKS, n // 2)
    return torch.cat([at[:sinks], at[len(at) - n + sinks :]]).expand(*scores.shape[:-1], n)


POLICIES = {
    "heavy hitters": Policy(lambda scores, n: highest(scores, n, n - n // 2)),
    "SnapKV": Policy(snap, SNAP_QUERIES, once=True),
    "sinks and window": Policy(window),
    "random": Policy(lambda scores, n: highest(torch.rand_like(scores), n, 0)),
}


class EvictingKV:
    """The cache of one block, which holds `share` (0 to 1] of the tokens read. One cache continues one batch.

    `key` and `value` are (B, n_kv_heads, S, head_dim), `positions` (B, n_kv_heads, S) their tokens' in the text.
    Use it inside `observed`, which lets `attend` see the queries; rows must not be padded.
    """

    def __init__(self, policy: Policy, share: float):
        if not 0 < share <= 1:
            raise InputError(f"share={share} must be above 0 and at most 1")
        self.policy = policy
        self.share = share
        self.length = 0
        self._chosen = False
        self.key = self.value = self.scores = self.positions = torch.empty(0)

    @property
    def bytes_used(self) -> int:
        """Bytes of the keys and values, without the scores."""
        return self.key.nbytes + self.value.nbytes

    def append(self, key: Tensor, value: Tensor) -> "EvictingKV":
        """Add the new tokens' key and value, (B, n_kv_heads, T_new, head_dim); `attend` then evicts."""
        longer = self.length + key.size(-2)
        positions = torch.arange(self.length, longer, device=key.device).expand(key.shape[:-1])
        new = key, value, positions, key.new_zeros(key.shape[:-1])
        old = self.key, self.value, self.positions, self.scores
        both = [torch.cat(pair, 2) for pair in zip(old, new)] if self.length else new
        self.key, self.value, self.positions, self.scores = both
        self.length = longer
        return self

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, dropout_p: float = 0.0
    ) -> Tensor:
        """`models.attention.attention`; then score the tokens and keep those that the policy chooses."""
        y = attention(q, k, v, mask, causal, dropout_p)
        n_queries = q.size(-2)
        size = k.size(-2)
        logits = q.unflatten(1, (k.size(1), -1)) @ k[:, :, None].mT * q.size(-1) ** -0.5  # (B, n_kv_heads, G, T, S)
        visible = torch.ones(n_queries, size, dtype=torch.bool, device=q.device).tril(size - n_queries)
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).mean(2)
        self.scores = self.scores + weights[:, :, -(self.policy.queries or n_queries) :].sum(-2)
        n = ceil(self.share * self.length)
        if n < size and not (self.policy.once and self._chosen):
            i = self.policy.keep(self.scores, n)
            self.positions, self.scores = self.positions.gather(2, i), self.scores.gather(2, i)
            self.key, self.value = (x.gather(2, i[..., None].expand(-1, -1, -1, x.size(-1))) for x in (k, v))
        self._chosen = True
        return y


@contextmanager
def observed(decoder: LanguageModel, caches: Sequence[EvictingKV]) -> Iterator[None]:
    """Compute each block's attention by its cache's `attend`; afterwards by `models.attention.attention`."""
    try:
        for block, cache in zip(decoder.blocks, caches, strict=True):
            block.attn.attend = cache.attend
        yield
    finally:
        for block in decoder.blocks:
            block.attn.attend = attention
