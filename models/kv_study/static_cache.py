"""Generation as exported graphs: a prefill and a decode step over caches of fixed capacity, for `torch.export`.

The blocks are those of the models themselves; StaticKV stands in for their KVCache. A step writes its keys and
values in place, into tensors that the caller owns, so one cache serves one sequence. Masks are computed from
start_pos, a tensor: no branch depends on data, and the graphs can be saved, loaded without this code, and lowered.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from models.decoding import GREEDY, SamplingParams, generate_tokens
from models.kv_study.encoder_decoder import KeysValues, TextDecoder
from models.language_model import LanguageModel, rope_cos_sin

Programs = dict[str, ExportedProgram]


class StaticKV:
    """A KVCache that always has its full length: appended tokens go where places (T,) int64 says."""

    def __init__(self, key: Tensor, value: Tensor, places: Tensor):
        self.key, self.value, self.places = key, value, places

    def append(self, key: Tensor, value: Tensor) -> "StaticKV":
        self.key.index_copy_(2, self.places, key)
        self.value.index_copy_(2, self.places, value)
        return self


class LanguageModelStep(nn.Module):
    """Embeddings, or ids, into a cache of fixed capacity: the next token's logits."""

    def __init__(self, decoder: LanguageModel):
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor, attention_mask: Tensor, start_pos: Tensor, kv_cache: list[KeysValues]) -> Tensor:
        """x (B, T) ids or (B, T, C) embeddings; attention_mask (B, capacity) is 0 at padding; start_pos () int64.

        kv_cache holds (B, n_kv_heads, capacity, head_dim) twice per block. Returns logits (B, vocabulary).
        """
        if not x.is_floating_point():
            x = self.decoder.token_embedding(x)
        places = start_pos + torch.arange(x.size(1), device=x.device)
        key = torch.arange(attention_mask.size(1), device=x.device)
        mask = (attention_mask[:, None, None] != 0) & (key <= places[:, None]) | (key == places[:, None])
        cos, sin = rope_cos_sin(mask.sum(-1) - 1, self.decoder.cfg)
        for block, (k, v) in zip(self.decoder.blocks, kv_cache):
            x, _ = block(x, cos, sin, mask, StaticKV(k, v, places))
        return self.decoder.head(self.decoder.norm(x[:, -1]))


class Cross(nn.Module):
    """What is told, (N, S, n_state), to each block's keys and values of it: the half of a prefill that has no words."""

    def __init__(self, decoder: TextDecoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, xa: Tensor) -> list[KeysValues]:
        return self.decoder.cross(xa)


class TextDecoderStep(nn.Module):
    """Ids into a cache of fixed capacity, about given cross keys and values: the next token's logits."""

    def __init__(self, decoder: TextDecoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor, start_pos: Tensor, cross: list[KeysValues], kv_cache: list[KeysValues]) -> Tensor:
        """ids (B, T); start_pos () int64; kv_cache (B, n_head, capacity, D) twice per block: logits (B, n_vocab)."""
        places = start_pos + torch.arange(ids.size(1), device=ids.device)
        mask = (torch.arange(kv_cache[0][0].size(2), device=ids.device) <= places[:, None])[None, None]
        statics = [StaticKV(k, v, places) for k, v in kv_cache]
        x, _ = self.decoder.through(self.decoder.embed(ids, places), cross, statics, mask)
        return self.decoder.logits(x[:, -1])


def new_cache(n_blocks: int, batch: int, n_heads: int, capacity: int, head_dim: int, like: Tensor) -> list[KeysValues]:
    """Empty caches of like's dtype and device. Zeros, because attention multiplies unwritten values by 0."""
    shape = (batch, n_heads, capacity, head_dim)
    return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(n_blocks)]


def language_model_cache(decoder: LanguageModel, batch: int, capacity: int) -> list[KeysValues]:
    cfg = decoder.cfg
    if capacity > (limit := cfg.lm_max_position_embeddings):
        raise ValueError(f"capacity={capacity} exceeds lm_max_position_embeddings={limit}")
    return new_cache(cfg.lm_n_blocks, batch, cfg.lm_n_kv_heads, capacity, cfg.lm_head_dim, decoder.norm.weight)


def text_decoder_cache(decoder: TextDecoder, batch: int, capacity: int) -> list[KeysValues]:
    n_ctx, n_state = decoder.positional_embedding.shape
    if capacity > n_ctx:
        raise ValueError(f"capacity={capacity} exceeds the decoder's n_ctx={n_ctx}")
    n_head = decoder.blocks[0].attn.n_head
    return new_cache(len(decoder.blocks), batch, n_head, capacity, n_state // n_head, decoder.ln.weight)


@torch.no_grad()
def export_language_model(decoder: LanguageModel, capacity: int, batch: int = 1) -> Programs:
    """`prefill`, of 2 to capacity embeddings, and `decode`, of one id a row; see LanguageModelStep for their inputs.

    `torch.export.save` writes each with a copy of the weights.
    """
    step, cache = LanguageModelStep(decoder).eval(), language_model_cache(decoder, batch, capacity)
    mask, start = torch.ones(batch, capacity, dtype=torch.long), torch.tensor(0)
    x, ids = cache[0][0].new_zeros(batch, 2, decoder.cfg.lm_hidden_dim), torch.zeros(batch, 1, dtype=torch.long)
    length = {1: Dim("length", min=2, max=capacity)}
    static = [(None, None)] * len(cache)
    return {
        "prefill": export(step, (x, mask, start, cache), dynamic_shapes=(length, None, None, static)),
        "decode": export(step, (ids, mask, start, cache)),
    }


@torch.no_grad()
def export_text_decoder(decoder: TextDecoder, n_patches: int, capacity: int, batch: int = 1) -> Programs:
    """`cross`, of (batch, n_patches, n_state); `prefill`, of 2 to capacity ids; and `decode`, of one id a row."""
    step, cache = TextDecoderStep(decoder).eval(), text_decoder_cache(decoder, batch, capacity)
    xa = cache[0][0].new_zeros(batch, n_patches, decoder.positional_embedding.size(1))
    cross, start = decoder.cross(xa), torch.tensor(0)
    two, one = torch.zeros(batch, 2, dtype=torch.long), torch.zeros(batch, 1, dtype=torch.long)
    length = {1: Dim("length", min=2, max=capacity)}
    static = [(None, None)] * len(cache)
    return {
        "cross": export(Cross(decoder).eval(), (xa,)),
        "prefill": export(step, (two, start, cross, cache), dynamic_shapes=(length, None, static, static)),
        "decode": export(step, (one, start, cross, cache)),
    }


@torch.no_grad()
def stream(prefill, decode, prompt: Tensor, *, sampling: SamplingParams = GREEDY, **options) -> Iterator[Tensor]:
    """Yield ids (B,) as two calls choose them: prefill(prompt, start) and decode(ids (B, 1), start), start () int64.

    options are autoregress's; the caller binds the calls to their caches, with room for prompt and answer.
    """
    length = prompt.size(1)

    def step(ids: Tensor) -> Tensor:
        nonlocal length
        logits, length = decode(ids[:, None], torch.tensor(length)), length + 1
        return logits

    yield from generate_tokens(prefill(prompt, torch.tensor(0)), step, sampling=sampling, **options)
