"""Whisper's cache: hung on a decoder from outside, by hooks on the projections that make keys and values.

The decoder (models/kv_study/encoder_decoder.py) and its attention know nothing of it. The idea is that of openai/whisper's
`install_kv_cache_hooks` (model.py); here the cache is a value, and a projection that was kept is not computed again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident

import torch
from torch import Tensor, nn

from models.kv_study.encoder_decoder import TextDecoder

_installed: set[tuple[int, int]] = set()  # (thread, decoder): two caches on one decoder would both grow


@dataclass(frozen=True)
class HookCache:
    """What a decoder's key and value projections have said so far, each (B, T, C), before the split into heads."""

    words: dict[nn.Module, Tensor] = field(default_factory=dict)  # of self-attention: grows
    picture: dict[nn.Module, Tensor] = field(default_factory=dict)  # of cross-attention: stays

    @property
    def length(self) -> int:
        """Words read so far."""
        return next((said.size(1) for said in self.words.values()), 0)

    def rows(self, index: Tensor) -> "HookCache":
        """The chosen rows of words, index (B_new,), which must stay with their picture: beams, reordered or split."""
        return HookCache({linear: said[index] for linear, said in self.words.items()}, self.picture)


@contextmanager
def install_kv_cache_hooks(decoder: TextDecoder, past: HookCache | None = None) -> Iterator[HookCache]:
    """`with install_kv_cache_hooks(decoder, past) as cache: logits = decoder(ids, xa, start_pos=past.length)`

    Within, decoder continues past, and cache says what it has read since; past stays as it was. The hooks act in the
    thread that installed them alone, and go on the way out, also after an error.
    """
    past = past or HookCache()
    cache, thread, mark = HookCache(dict(past.words), dict(past.picture)), get_ident(), (get_ident(), id(decoder))
    if mark in _installed:
        raise RuntimeError("another cache is installed on this decoder; leave its `with` before installing this one")

    def grow(linear, args, said):
        if get_ident() != thread:
            return None
        if linear in cache.words:
            said = torch.cat([cache.words[linear], said], dim=1)
        cache.words[linear] = said
        return said

    def ask_nothing(linear, args):
        if get_ident() == thread and linear in cache.picture:
            return (args[0][:, :0],)  # the answer is known
        return None

    def keep(linear, args, said):
        return cache.picture.setdefault(linear, said) if get_ident() == thread else None

    handles = []
    _installed.add(mark)
    try:
        for block in decoder.blocks:
            for linear in (block.attn.key, block.attn.value):
                handles.append(linear.register_forward_hook(grow))
            for linear in (block.cross_attn.key, block.cross_attn.value):
                handles.append(linear.register_forward_pre_hook(ask_nothing))
                handles.append(linear.register_forward_hook(keep))
        yield cache
    finally:
        _installed.discard(mark)
        for handle in handles:
            handle.remove()
