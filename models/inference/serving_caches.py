"""The caches of continuous batching: running sequences, encoded images, and the keys and values of earlier prompts."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from models.errors import InputError
from models.inference.inference_model import InferenceModel, Network
from models.inference.kernel_network import empty_cache

V = TypeVar("V")
ImageStarts = Sequence[tuple[Hashable | None, int]]  # key of each image, and the position of its first token

SLOT_CAPACITY_STEP = 64  # tokens; the capacity of a slot is a multiple of it
MIN_PREFIX_TOKENS = 32  # shorter common prefixes cost less to compute again than to handle
MAX_PREFIXES = 256  # each of them is compared with a new prompt


class SlotCache:
    """Keys and values of running sequences, one a slot: data (n_blocks, 2, slots, n_kv_heads, capacity, head_dim)."""

    def __init__(self, max_slots: int, max_tokens: int):
        self.max_slots, self.max_tokens = max_slots, max_tokens
        self.data = torch.empty(0, 0, 0, 0, 0, 0)

    def reserve(self, network: Network, n_slots: int, n_tokens: int, *, keep: bool) -> None:
        """Make it large enough, with room to grow into; without keep it forgets its contents, and may shrink."""
        old = self.data
        if n_slots <= old.size(2) and n_tokens <= old.size(4):
            return
        if keep:
            n_slots = max(min(2 * n_slots, self.max_slots), old.size(2)) if n_slots > old.size(2) else old.size(2)
            n_tokens = max(n_tokens, old.size(4) * 5 // 4) if n_tokens > old.size(4) else old.size(4)
        capacity = min(-(-n_tokens // SLOT_CAPACITY_STEP) * SLOT_CAPACITY_STEP, self.max_tokens)
        self.data = empty_cache(network, n_slots, capacity)
        if keep:
            self.data[:, :, : old.size(2), :, : old.size(4)] = old


class LRUCache(Generic[V]):
    """Values by key up to a number of bytes; those used longest ago go first. Threads may use it."""

    def __init__(self, max_bytes: int):
        if max_bytes < 0:
            raise InputError(f"max_bytes={max_bytes} is negative")
        self.max_bytes, self.bytes_used = max_bytes, 0
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """The value of a key, which counts as used now; None if there is none."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: V, n_bytes: int) -> None:
        """Store a value of that many bytes, unless it alone is too large."""
        with self._lock:
            self._drop(key)
            if n_bytes > self.max_bytes:
                return
            self._values[key] = value, n_bytes
            self.bytes_used += n_bytes
            while self.bytes_used > self.max_bytes:
                self._drop(next(iter(self._values)))

    def drop(self, key: Hashable) -> None:
        with self._lock:
            self._drop(key)

    def items(self) -> list[tuple[Hashable, V]]:
        """All keys and values, those used longest ago first; none of them counts as used now."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._values.items()]

    def _drop(self, key: Hashable) -> None:
        if key in self._values:
            self.bytes_used -= self._values.pop(key)[1]


@dataclass(eq=False)
class TiledImage:
    """An image of a prompt: its tiles until they are encoded, its embeddings from then on.

    key says what it shows, for example a hash of its file: images of equal keys are encoded once. grid is the caller's.
    """

    tiles: Tensor | None  # (n, 3, S, S)
    key: Hashable | None = None
    grid: tuple[int, int] | None = None
    embeds: Tensor | None = None  # (n, L, C)

    @property
    def n_tiles(self) -> int:
        images = self.tiles if self.embeds is None else self.embeds
        return 0 if images is None else len(images)

    def encoded(self, embeds: Tensor) -> None:
        """Keep the embeddings, and forget the tiles."""
        self.embeds, self.tiles = embeds, None


class ImageCache(LRUCache[TiledImage]):
    """Encoded images by key, up to max_bytes of embeddings. The model's weights must not change."""

    def add(self, image: TiledImage) -> None:
        """Store an encoded image that has a key."""
        if image.key is not None and image.embeds is not None:
            self.put(image.key, image, image.embeds.nbytes)


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The keys and values of a sequence's first tokens."""

    ids: Tensor  # (T,), on the CPU
    images: ImageStarts
    kv: Tensor  # (n_blocks, 2, n_kv_heads, T, head_dim)

    @cached_property
    def head(self) -> Hashable:
        return sequence_head(self.ids, self.images)

    def common_length(self, ids: Tensor, images: ImageStarts) -> int:
        """How many leading tokens another sequence has in common, images included."""
        return common_prefix_length(self.ids, ids, self.images, images)


class PrefixCache(LRUCache[CachedPrefix]):
    """Keys and values of finished sequences, up to max_bytes, for prompts that begin alike, such as a chat's next turn.

    The model's weights must not change.
    """

    def find(self, ids: Tensor, images: ImageStarts) -> tuple[CachedPrefix | None, int]:
        """The entry that begins like a prompt, and how many tokens; at least one token of the prompt is left."""
        best, length, best_key = None, MIN_PREFIX_TOKENS - 1, None
        head = sequence_head(ids, images)
        for key, entry in self.items():
            if entry.head == head:
                n = min(entry.common_length(ids, images), len(ids) - 1)
                if n > length:
                    best, length, best_key = entry, n, key
        if best is None:
            return None, 0
        self.get(best_key)
        return best, length

    def add(self, entry: CachedPrefix) -> None:
        """Store a sequence; it replaces those that it begins with."""
        for key, other in self.items():
            if other.head == entry.head and other.common_length(entry.ids, entry.images) == len(other.ids):
                self.drop(key)
        if len(entry.ids) >= MIN_PREFIX_TOKENS:
            self.put(id(entry), entry, entry.kv.nbytes)
        for key, _ in self.items()[:-MAX_PREFIXES]:
            self.drop(key)


def encode_images(model: InferenceModel, images: Sequence[TiledImage], cache: ImageCache | None) -> list[Tensor]:
    """The embeddings (n, L, C) of each image; those that are not in the cache are encoded together, equal keys once."""
    pending: dict[Hashable, list[TiledImage]] = {}
    for image in images:
        cached = cache.get(image.key) if cache is not None and image.key is not None else None
        if image.embeds is None and cached is not None and cached.embeds is not None:
            image.encoded(cached.embeds)
        if image.embeds is None:
            pending.setdefault(id(image) if image.key is None else image.key, []).append(image)
    if tiles := [same[0].tiles for same in pending.values() if same[0].tiles is not None]:
        embeds = model.encode_images(torch.cat(tiles).to(model.device))
        for same, part in zip(pending.values(), embeds.split([len(one) for one in tiles])):
            for image in same:
                image.encoded(part.clone() if cache is not None else part)
            if cache is not None:
                cache.add(same[0])
    return [image.embeds for image in images if image.embeds is not None]


def common_prefix_length(ids: Tensor, others: Tensor, images: ImageStarts = (), other_images: ImageStarts = ()) -> int:
    """How many leading ids (T,) two sequences have in common; it ends at the first image that is not the same."""
    n = min(len(ids), len(others))
    differs = (ids[:n] != others[:n]).nonzero()
    n = int(differs[0]) if len(differs) else n
    for (key, start), (other, _) in zip(images, other_images):
        if start < n and (key is None or key != other):
            return start
    return n


def sequence_head(ids: Tensor, images: ImageStarts) -> Hashable:
    """What two sequences with a common prefix of MIN_PREFIX_TOKENS have in common; cheap to compare."""
    keys = tuple(key for key, start in images if start < MIN_PREFIX_TOKENS)
    return tuple(ids[:MIN_PREFIX_TOKENS].tolist()), keys


def image_starts(ids: Tensor, images: Sequence[TiledImage], image_token_id: int, tokens_per_tile: int) -> ImageStarts:
    """The key of each image, and the position of its first token in ids (T,)."""
    positions = torch.nonzero(ids == image_token_id)[:, 0].tolist()
    starts, n = [], 0
    for image in images:
        starts.append((image.key, positions[n] if n < len(positions) else len(ids)))
        n += image.n_tiles * tokens_per_tile
    return starts
