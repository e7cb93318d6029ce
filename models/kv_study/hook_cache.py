"""Whisper's cache: forward hooks on a decoder's key and value projections, installed from outside.

The decoder (models/kv_study/encoder_decoder.py) and its attention contain no cache code. The design is that of
openai/whisper's `install_kv_cache_hooks` (model.py). Here the cache is an immutable value, and the keys and values of
cross-attention are not only stored but also not computed again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident

import torch
from torch import Tensor, nn

from models.kv_study.encoder_decoder import TextDecoder

_installed: set[tuple[int, int]] = set()  # (thread, decoder) pairs: two caches on one decoder would both grow


@dataclass(frozen=True)
class HookCache:
    """Cached outputs of a decoder's key and value projections, each (B, T, C), before they are split into heads."""

    self_kv: dict[nn.Module, Tensor] = field(default_factory=dict)  # of self-attention: grows by every token
    cross_kv: dict[nn.Module, Tensor] = field(default_factory=dict)  # of cross-attention: computed once per image

    @property
    def length(self) -> int:
        """Number of tokens cached."""
        return next((projected.size(1) for projected in self.self_kv.values()), 0)

    def rows(self, index: Tensor) -> "HookCache":
        """Select sequences by index (B_new,), as beam search does; each must stay with its image."""
        return HookCache({linear: projected[index] for linear, projected in self.self_kv.items()}, self.cross_kv)


@contextmanager
def install_kv_cache_hooks(decoder: TextDecoder, past: HookCache | None = None) -> Iterator[HookCache]:
    """`with install_kv_cache_hooks(decoder, past) as cache: logits = decoder(ids, xa, start_pos=past.length)`

    Inside the context, the decoder continues `past`, and `cache` holds past and new tokens; `past` is not changed.
    The hooks act only in the thread that installed them, and are removed on exit, also after an error.
    """
    past = past or HookCache()
    cache, key = HookCache(dict(past.self_kv), dict(past.cross_kv)), (get_ident(), id(decoder))
    if key in _installed:
        raise RuntimeError("another cache is installed on this decoder; leave its `with` before installing this one")
    append_self, skip_cross, store_cross = _make_hooks(cache)
    handles = []
    _installed.add(key)
    try:
        for block in decoder.blocks:
            for linear in (block.attn.key, block.attn.value):
                handles.append(linear.register_forward_hook(append_self))
            for linear in (block.cross_attn.key, block.cross_attn.value):
                handles.append(linear.register_forward_pre_hook(skip_cross))
                handles.append(linear.register_forward_hook(store_cross))
        yield cache
    finally:
        _installed.discard(key)
        for handle in handles:
            handle.remove()


def _make_hooks(cache: HookCache) -> tuple[Callable, Callable, Callable]:
    """Hooks that extend cache in the current thread; a hook that returns None changes nothing."""
    thread = get_ident()

    def append_self(linear: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor | None:
        """Forward hook of self-attention: prepend the cached tokens to the new ones."""
        if get_ident() != thread:
            return None
        if linear in cache.self_kv:
            output = torch.cat([cache.self_kv[linear], output], dim=1)
        cache.self_kv[linear] = output
        return output

    def skip_cross(linear: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        """Forward pre-hook of cross-attention: pass an empty input once the output is cached."""
        if get_ident() == thread and linear in cache.cross_kv:
            return (args[0][:, :0],)
        return None

    def store_cross(linear: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor | None:
        """Forward hook of cross-attention: store the first output and return it from then on."""
        return cache.cross_kv.setdefault(linear, output) if get_ident() == thread else None

    return append_self, skip_cross, store_cross
