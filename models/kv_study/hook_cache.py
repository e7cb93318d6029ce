"""Whisper's cache: forward hooks on a decoder's key and value projections, installed from outside.

As openai/whisper's `install_kv_cache_hooks` (model.py), but cross-attention's keys and values are computed once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import InputError
from models.kv_study.text_decoder import TextDecoder

_installed: set[int] = set()  # ids of decoders: two caches on one would both grow


@dataclass
class HookCache:
    """Outputs (B, T, C) of a decoder's key and value projections, detached: gradients flow through the newest call."""

    self_kv: dict[nn.Module, Tensor] = field(default_factory=dict)  # of self-attention: grows by every token
    cross_kv: dict[nn.Module, Tensor] = field(default_factory=dict)  # of cross-attention: computed once per image
    xa: Tensor | None = None  # a copy of the encoded images (N, S, C) behind cross_kv

    @property
    def length(self) -> int:
        """Number of tokens cached."""
        return next((projected.size(1) for projected in self.self_kv.values()), 0)

    def rows(self, index: Tensor) -> "HookCache":
        """Select sequences by index (B_new,), as beam search does; each must stay with its image."""
        self_kv = {linear: projected[index] for linear, projected in self.self_kv.items()}
        return HookCache(self_kv, self.cross_kv, self.xa)


@contextmanager
def install_kv_cache_hooks(decoder: TextDecoder | nn.Module, past: HookCache | None = None) -> Iterator[HookCache]:
    """`with install_kv_cache_hooks(decoder, past) as cache: logits = decoder(ids, xa)`

    Each call of the decoder, by one thread, continues `cache`, which starts as a copy of `past`. InputError for another
    start_pos than cache.length, or another xa. openai-whisper's own decoder reads one token a call after the first.
    """
    past = past or HookCache()
    cache, key = HookCache(dict(past.self_kv), dict(past.cross_kv), past.xa), id(decoder)
    if key in _installed:
        raise RuntimeError("another cache is installed on this decoder; leave its `with` before installing this one")
    hooks, handles = _Hooks(cache), []
    _installed.add(key)
    try:
        handles.append(decoder.register_forward_pre_hook(hooks.begin_call, with_kwargs=True))
        handles.append(decoder.register_forward_hook(hooks.end_call))
        blocks: Any = decoder.blocks
        for block in blocks:
            for linear in (block.attn.key, block.attn.value):
                handles.append(linear.register_forward_hook(hooks.append_self))
            for linear in (block.cross_attn.key, block.cross_attn.value):
                handles.append(linear.register_forward_pre_hook(hooks.skip_cross))
                handles.append(linear.register_forward_hook(hooks.store_cross))
        yield cache
    finally:
        _installed.discard(key)
        for handle in handles:
            handle.remove()


class _Hooks:
    """The hooks of one cache. What a call computes is pending until the decoder returns, then it is cached."""

    def __init__(self, cache: HookCache):
        self.cache = cache
        self.pending: HookCache | None = None  # of the call in progress

    def begin_call(self, decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Pre-hook of the decoder: check that the call continues the cache, and fill in start_pos."""
        call = dict(zip(("x", "xa", "start_pos"), args), **kwargs)
        past = self.cache.length
        if call.setdefault("start_pos", past) != past:
            raise InputError(f"start_pos={call['start_pos']}, but the cache holds {past} tokens; leave start_pos out")
        xa, cached = call["xa"], self.cache.xa
        if cached is not None and (xa.dtype != cached.dtype or not torch.equal(xa, cached)):
            raise InputError(f"xa {tuple(xa.shape)} is not the cached one; install the hooks without `past`")
        if "start_pos" not in signature(decoder.forward).parameters:  # openai-whisper's own decoder, which counts them
            del call["start_pos"]
            call["kv_cache"] = dict(self.cache.self_kv)
        xa = xa.detach().clone() if cached is None else cached
        self.pending = HookCache(dict(self.cache.self_kv), dict(self.cache.cross_kv), xa)
        return (), call

    def end_call(self, decoder: nn.Module, args: tuple, output: Tensor) -> None:
        """Forward hook of the decoder: cache what the call computed."""
        vars(self.cache).update(vars(self._call()))
        self.pending = None

    def append_self(self, linear: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Forward hook of self-attention: prepend the cached tokens to the new ones."""
        kv = self._call().self_kv
        if linear in kv:
            output = torch.cat([kv[linear], output], dim=1)
        kv[linear] = output.detach()
        return output

    def skip_cross(self, linear: nn.Module, args: tuple) -> tuple[Tensor] | None:
        """Forward pre-hook of cross-attention: pass an empty input once the output is cached."""
        return (args[0][:, :0],) if linear in self._call().cross_kv else None

    def store_cross(self, linear: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Forward hook of cross-attention: store the first output and return it from then on."""
        if linear in (kv := self._call().cross_kv):
            return kv[linear]
        kv[linear] = output.detach()
        return output

    def _call(self) -> HookCache:
        if self.pending is None:
            raise RuntimeError("while hooks are installed, call the decoder itself: not its blocks, nor its `forward`")
        return self.pending
