"""The plain modules behind the interface of KernelNetwork: on GPUs, without a C compiler, and as the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.cache import KVCache
from models.vision_language_model import PrefillState, VisionLanguageModel


class PlainNetwork:
    def __init__(self, model: VisionLanguageModel):
        self.model = model
        self.cache_dtype = model.dtype

    def encode_images(self, images: Tensor) -> Tensor:
        """See `VisionLanguageModel.encode_images`."""
        return self.model.encode_images(images)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """See `VisionLanguageModel.embed_tokens`."""
        return self.model.embed_tokens(ids)

    def prefill_embeds(
        self, embeds: Tensor, attention_mask: Tensor | None, prefix: PrefillState | None
    ) -> tuple[Tensor, PrefillState]:
        """See `VisionLanguageModel.prefill_embeds`; the prefix may be of another dtype or device."""
        if prefix is not None:
            like = torch.empty(0, dtype=self.cache_dtype, device=self.model.device)
            kv_cache = [KVCache(kv.key.to(like), kv.value.to(like)) for kv in prefix.kv_cache]
            if kv_cache[0].key is not prefix.kv_cache[0].key:
                prefix = PrefillState(kv_cache, prefix.attention_mask)
        return self.model.prefill_embeds(embeds, attention_mask, prefix)

    def new_cache(self, n_sequences: int, capacity: int) -> Tensor:
        """An empty cache for `run`."""
        cfg = self.model.cfg
        shape = cfg.lm_n_blocks, 2, n_sequences, cfg.lm_n_kv_heads, capacity, cfg.lm_head_dim
        return torch.zeros(shape, dtype=self.cache_dtype, device=self.model.device)

    def run(self, x: Tensor, cache: Tensor, past: Sequence[int], mask: None, last: Sequence[int]) -> Tensor:
        """See `KernelNetwork.run`; of sequences with different `past`, one new token each."""
        (B, T, _), span = x.shape, max(past)
        rows, lengths = torch.arange(B, device=x.device), torch.tensor(past, device=x.device)
        attention_mask, blocks = None, cache[..., :span, :]
        if min(past) < span:  # what lies behind a sequence's tokens is padding, and may be anything
            used = torch.arange(span, device=x.device) < lengths[:, None]
            attention_mask = torch.cat([used, used.new_ones(B, T)], dim=1).long()
            blocks = blocks.masked_fill(~used[:, None, :, None], 0)
        kv_cache = [KVCache(key, value) for key, value in blocks] if span else None
        hidden, longer = self.model.decoder(x, attention_mask, kv_cache, span)
        places = lengths[:, None] + torch.arange(T, device=x.device)
        for (key, value), kv in zip(cache, longer):
            key[rows[:, None], :, places] = kv.key[:, :, span:].transpose(1, 2)
            value[rows[:, None], :, places] = kv.value[:, :, span:].transpose(1, 2)
        return self.model.decoder.head(hidden[rows, torch.tensor(last, device=x.device)])
