"""The caches of continuous batching: encoded images, and the keys and values of earlier prompts."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from models.common.errors import InputError
from models.inference.inference_model import Network

V = TypeVar("V")
ImageStarts = Sequence[tuple[Hashable, int]]  # each image's key, and the position of its first token

MIN_PREFIX_TOKENS = 32  # shorter common prefixes cost less to compute again than to handle
MAX_ENTRIES = 256  # of a cache: each prefix is compared with a new prompt


class LRUCache(Generic[V]):
    """Values by key up to a number of bytes; those used longest ago go first. Threads may use it."""

    def __init__(self, max_bytes: int, max_entries: int = MAX_ENTRIES):
        if max_bytes < 0:
            raise InputError(f"max_bytes={max_bytes} is negative")
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.bytes_used = 0
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.RLock()

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
            self.drop(key)
            if n_bytes > self.max_bytes:
                return
            self._values[key] = value, n_bytes
            self.bytes_used += n_bytes
            while self.bytes_used > self.max_bytes or len(self._values) > self.max_entries:
                self.drop(next(iter(self._values)))

    def drop(self, key: Hashable) -> None:
        with self._lock:
            if key in self._values:
                self.bytes_used -= self._values.pop(key)[1]

    def items(self) -> list[tuple[Hashable, V]]:
        """All keys and values, those used longest ago first; none of them counts as used now."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._values.items()]


@dataclass(eq=False)
class TiledImage:
    """An image of a prompt: its tiles until they are encoded, its embeddings from then on.

    Images of equal keys, such as hashes of their files, are encoded once. grid is the caller's.
    """

    tiles: Tensor | None  # (n, 3, S, S)
    key: Hashable = field(default_factory=object)  # by default equal to no other
    grid: tuple[int, int] | None = None
    embeds: Tensor | None = None  # (n, L, C)

    @property
    def n_tiles(self) -> int:
        images = self.tiles if self.embeds is None else self.embeds
        return 0 if images is None else len(images)


class ImageCache(LRUCache[TiledImage]):
    """Encoded images by key, up to max_bytes. The model's weights must not change."""


def encode_images(network: Network, images: Sequence[TiledImage], cache: ImageCache | None) -> None:
    """Encode in one batch the images without embeddings, here or in the cache; those of equal keys once."""
    pending: dict[Hashable, list[TiledImage]] = {}
    for image in images:
        cached = None if cache is None or image.embeds is not None else cache.get(image.key)
        if cached is not None:
            image.embeds = cached.embeds
            image.tiles = None
        elif image.embeds is None:
            pending.setdefault(image.key, []).append(image)
    if not pending:
        return
    tiles = [same[0].tiles for same in pending.values() if same[0].tiles is not None]
    embeds = network.encode_images(torch.cat(tiles).to(network.model.device))
    for same, part in zip(pending.values(), embeds.split([len(one) for one in tiles])):
        part = part if cache is None else part.clone()  # a view would keep all of them in memory
        for image in same:
            image.embeds = part
            image.tiles = None
        if cache is not None:
            cache.put(same[0].key, same[0], part.nbytes)


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The keys and values of a sequence's first tokens."""

    ids: Sequence[int]
    starts: ImageStarts
    kv: Tensor  # (n_blocks, 2, n_kv_heads, T, head_dim)


class PrefixCache(LRUCache[CachedPrefix]):
    """Keys and values of finished sequences, for prompts that begin alike, such as a chat's next turn.

    The model's weights must not change.
    """

    def find(self, ids: Sequence[int], starts: ImageStarts) -> tuple[int, Tensor | None]:
        """The longest prefix that an entry has in common with a prompt: its length and the entry's keys and values."""
        lengths = {key: common_prefix(entry.ids, entry.starts, ids, starts) for key, entry in self.items()}
        best = max(lengths, key=lengths.__getitem__, default=None)
        found = self.get(best) if best is not None and lengths[best] else None
        return (0, None) if found is None else (lengths[best], found.kv)

    def add(self, entry: CachedPrefix) -> None:
        """Store a sequence; it replaces those that it begins with."""
        for key, other in self.items():
            if common_prefix(other.ids, other.starts, entry.ids, entry.starts) == len(other.ids):
                self.drop(key)
        if len(entry.ids) >= MIN_PREFIX_TOKENS:
            self.put(id(entry), entry, entry.kv.nbytes)


def common_prefix(ids: Sequence[int], starts: ImageStarts, others: Sequence[int], other_starts: ImageStarts) -> int:
    """How many leading ids two sequences have in common, up to the first image that differs; 0 for too few."""
    n = min(len(ids), len(others))
    for (key, start), (other, other_start) in zip(starts, other_starts):
        if key != other:
            n = min(n, start, other_start)
            break
    if n < MIN_PREFIX_TOKENS or ids[:MIN_PREFIX_TOKENS] != others[:MIN_PREFIX_TOKENS]:  # nearly always
        return 0
    return next((i for i, (a, b) in enumerate(zip(ids[:n], others)) if a != b), n)
