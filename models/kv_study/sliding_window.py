"""A sliding window: each token attends to the last `window` tokens, so that the cache stops growing.

The buffer is Mistral's (Jiang et al. 2023, "rolling buffer cache"): once it is full, a new token overwrites the oldest.
`sinks` tokens at the beginning stay visible to all, as in StreamingLLM (Xiao et al. 2024); for a vision-language model
they can be the image. Unlike StreamingLLM, keys keep the rotary positions they were computed at; the distance to every
token of the window stays below `window`, however long the text.

The output equals that of a window mask without a cache, `forward(decoder, x, window)`, not that of recomputing the last
`window` tokens alone: a cached key of block 2 has seen, through block 1, tokens that have left the window since.
`GPT.generate` recomputes beyond block_size, because its positions are learned and absolute: when the window moves,
every key changes. So `GPT_kv.generate_kv` drops its cache there; a rolling buffer needs positions such as RoPE's.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from models.common.errors import InputError
from models.kv_study.block_cache import block_caches
from models.language_model import LanguageModel, rope_cos_sin


class SlidingWindowKV:
    """Keys and values of one block's first `sinks` and last `window` tokens.

    Decoding writes in place, so one cache continues one batch of sequences; `rows` makes a copy to continue otherwise.
    The tokens of a prefill stay until the next `append`: attention must still read them.
    """

    def __init__(self, window: int, sinks: int = 0):
        if window < 1 or sinks < 0:
            raise InputError(f"window={window} must be 1 or more, and sinks={sinks} 0 or more")
        self.window = window
        self.sinks = sinks
        self.length = 0
        self.key, self.value = torch.empty(0), torch.empty(0)
        self.positions = torch.arange(0)  # (S,) on the CPU, of the tokens in key and value
        self._oldest = sinks  # index of the token to overwrite, once all places are taken

    @property
    def bytes_used(self) -> int:
        """Bytes of the cached tokens."""
        return self.key.nbytes + self.value.nbytes

    def visible(self) -> Tensor:
        """Indices of the cached tokens that the next token attends to, in the order of their positions."""
        order = self.positions.argsort()
        at = self.positions[order]
        return order[(at < self.sinks) | (at > self.length - self.window)]

    def append(self, key: Tensor, value: Tensor) -> "SlidingWindowKV":
        """Add the new tokens' key and value, (B, n_kv_heads, T_new, head_dim), and drop what none of them sees."""
        n = key.size(-2)
        size = self.sinks + self.window
        if n == 1 and len(self.positions) == size <= self.length:
            self.key[:, :, self._oldest], self.value[:, :, self._oldest] = key[:, :, 0], value[:, :, 0]
            self.positions[self._oldest] = self.length
            self._oldest = self.sinks + (self._oldest + 1 - self.sinks) % self.window
        else:
            new = torch.arange(self.length, self.length + n)
            if self.length:
                kept = self.visible()
                index = kept.to(key.device)
                key = torch.cat([self.key.index_select(2, index), key], 2)
                value = torch.cat([self.value.index_select(2, index), value], 2)
                new = torch.cat([self.positions[kept], new])
            self.key = key
            self.value = value
            self.positions = new
            self._oldest = self.sinks
        self.length += n
        return self

    def rows(self, index: Tensor) -> "SlidingWindowKV":
        """A copy of the chosen rows of the batch, index (B_new,)."""
        chosen = copy(self)
        chosen.key, chosen.value = self.key.index_select(0, index), self.value.index_select(0, index)
        chosen.positions = self.positions.clone()
        return chosen


def window_mask(queries: Tensor, keys: Tensor, window: int, sinks: int = 0) -> Tensor:
    """Which positions keys (S,) each position of queries (T,) attends to: (T, S) bool."""
    query = queries[:, None]
    key = keys[None, :]
    return (key <= query) & ((key > query - window) | (key < sinks))


def forward(
    decoder: LanguageModel, x: Tensor, window: int, sinks: int = 0, caches: Sequence[SlidingWindowKV] = ()
) -> Tensor:
    """Hidden states (B, T, C) of embeddings x (B, T, C) under a window mask, after the tokens in caches, if given.

    The caches, one per block, grow by x; a prompt may come in chunks of any length. There is no limit of positions.
    After a prompt, `decoder` itself decodes with them: one token needs no mask.
    """
    past = caches[0].length if caches else 0
    new = torch.arange(past, past + x.size(1))
    seen = caches[0].positions[caches[0].visible()] if past else new[:0]
    mask = window_mask(new, torch.cat([seen, new]), window, sinks).to(x.device)[None, None] if len(new) > 1 else None
    cos, sin = rope_cos_sin(new.to(x.device), decoder.cfg)
    kv_cache = block_caches(caches)
    for i, block in enumerate(decoder.blocks):
        x, _ = block(x, cos, sin, mask, kv_cache[i] if kv_cache else None)
    return decoder.norm(x)
