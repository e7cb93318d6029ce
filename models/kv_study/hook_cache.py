"""Whisper's cache: forward hooks on a decoder's key and value projections, installed from outside.

As openai/whisper's `install_kv_cache_hooks` (model.py), with checks: a call must continue what is cached.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from models.common.errors import InputError

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


def store_projections(decoder: nn.Module, cache: Callable[[], dict[nn.Module, Tensor]]) -> list[RemovableHandle]:
    """Register hooks that append the outputs of all key and value projections to cache() and return the whole.

    A decoder that is given the same dictionary as `kv_cache` skips the projections of cross-attention that are there.
    """

    def store(linear: nn.Module, args: tuple, output: Tensor) -> Tensor:
        kept = cache()
        if linear in kept:
            output = torch.cat([kept[linear], output], dim=1)
        kept[linear] = output.detach()
        return output

    blocks: Any = decoder.blocks
    attentions = [attention for block in blocks for attention in (block.attn, block.cross_attn)]
    linears = [linear for attention in attentions for linear in (attention.key, attention.value)]
    return [linear.register_forward_hook(store) for linear in linears]


@contextmanager
def install_kv_cache_hooks(decoder: nn.Module, past: HookCache | None = None) -> Iterator[HookCache]:
    """`with install_kv_cache_hooks(decoder, past) as cache: logits = decoder(ids, xa)`

    Each call of the decoder, by one thread, continues `cache`, a copy of `past` at first; one that fails leaves it as
    it was. InputError for a start_pos or an xa that does not continue it, and for two tokens of openai-whisper's own
    decoder, whose mask has no past.
    """
    past = past or HookCache()
    cache = HookCache(dict(past.self_kv), dict(past.cross_kv), past.xa)
    if id(decoder) in _installed:
        raise RuntimeError("another cache is installed on this decoder; leave its `with` before installing this one")
    call: dict[str, Any] = {}  # arguments of the call in progress

    def begin_call(decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        nonlocal call
        new = dict(zip(("x", "xa", "start_pos"), args), **kwargs)
        _check_call(decoder, new, cache)
        call = new | {"kv_cache": {**cache.self_kv, **cache.cross_kv}}
        return (), call

    def end_call(decoder: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        nonlocal call
        cross = [linear for block in blocks for linear in (block.cross_attn.key, block.cross_attn.value)]
        cache.cross_kv = {linear: kept for linear, kept in call["kv_cache"].items() if linear in cross}
        cache.self_kv = {linear: kept for linear, kept in call["kv_cache"].items() if linear not in cross}
        cache.xa = call["xa"].detach().clone() if cache.xa is None else cache.xa
        call = {}

    def projections() -> dict[nn.Module, Tensor]:
        if not call:
            raise RuntimeError("while hooks are installed, call the decoder itself: not its blocks, nor its `forward`")
        return call["kv_cache"]

    blocks: Any = decoder.blocks
    handles = store_projections(decoder, projections)
    handles.append(decoder.register_forward_pre_hook(begin_call, with_kwargs=True))
    handles.append(decoder.register_forward_hook(end_call, with_kwargs=True))
    _installed.add(id(decoder))
    try:
        yield cache
    finally:
        _installed.discard(id(decoder))
        for handle in handles:
            handle.remove()


def _check_call(decoder: nn.Module, call: dict[str, Any], cache: HookCache) -> None:
    """Raise InputError for a call that does not continue the cache; leave out start_pos, which the cache gives."""
    past = cache.length
    n_new = call["x"].size(1)
    xa = call["xa"]
    if (start := call.pop("start_pos", past)) != past:
        raise InputError(f"start_pos={start}, but the cache holds {past} tokens; leave start_pos out")
    if cache.xa is not None and (xa.dtype != cache.xa.dtype or not torch.equal(xa, cache.xa)):
        raise InputError(f"xa {tuple(xa.shape)} is not the cached one; install the hooks without `past`")
    if past and n_new > 1 and "start_pos" not in signature(decoder.forward).parameters:
        raise InputError(f"{n_new} tokens behind {past}: openai-whisper's decoder reads one at a time")
