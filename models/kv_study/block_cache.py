"""Contract of a block's cache: other designs take the place of `models.cache.KVCache`.

`Attention.forward` calls `append` once per step and reads `key` and `value` of the result, and the model reads
`length`: a design is a class with these names, and the blocks stay as they are. Give a VisionLanguageModel (not an
InferenceModel, which has a cache of its own) one empty cache per block:
`model.prefill(ids, images, prefix=prefill_state([PagedKV(p) for p in pools]))`.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

from models.cache import KVCache
from models.vision_language_model import PrefillState


class BlockCache(Protocol):
    """The cache of one block; beam search, and several answers to one prompt, also call `rows(index)`."""

    @property
    def key(self) -> Tensor: ...  # (B, n_kv_heads, S, head_dim), rotary positions applied
    @property
    def value(self) -> Tensor: ...  # likewise
    @property
    def length(self) -> int: ...  # tokens read, which is the position of the next one
    @property
    def bytes_used(self) -> int: ...  # memory in use
    def append(self, key: Tensor, value: Tensor) -> "BlockCache": ...


def block_caches(caches: Sequence[BlockCache]) -> list[KVCache]:
    """One cache per block, typed as `LanguageModel.forward` expects them."""
    return cast(list[KVCache], list(caches))


def prefill_state(caches: Sequence[BlockCache]) -> PrefillState:
    """A prefix to prefill from, of one cache per block; without padding."""
    return PrefillState(block_caches(caches))
