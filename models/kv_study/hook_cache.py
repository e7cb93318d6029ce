"""Whisper's cache: forward hooks on a decoder's key and value projections, installed from outside.

The decoder (models/kv_study/encoder_decoder.py) and its attention contain no cache code. The design is that of
openai/whisper's `install_kv_cache_hooks` (model.py). Here the keys and values of cross-attention are not only stored
but also not computed again, a call that fails leaves the cache as it was, and one that does not continue it raises.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import InputError
from models.kv_study.encoder_decoder import TextDecoder

_installed: set[tuple[int, int]] = set()  # (thread, decoder) pairs: two caches on one decoder would both grow


@dataclass
class HookCache:
    """Cached outputs of a decoder's key and value projections, each (B, T, C), before they are split into heads.

    All tensors are detached: gradients flow through the newest call only.
    """

    self_kv: dict[nn.Module, Tensor] = field(default_factory=dict)  # of self-attention: grows by every token
    cross_kv: dict[nn.Module, Tensor] = field(default_factory=dict)  # of cross-attention: computed once per image
    xa: Tensor | None = None  # a copy of the encoded images (N, S, C) from which cross_kv was computed

    @property
    def length(self) -> int:
        """Number of tokens cached."""
        return next((projected.size(1) for projected in self.self_kv.values()), 0)

    def rows(self, index: Tensor) -> "HookCache":
        """Select sequences by index (B_new,), as beam search does; each must stay with its image."""
        return HookCache(
            {linear: projected[index] for linear, projected in self.self_kv.items()}, self.cross_kv, self.xa
        )


@contextmanager
def install_kv_cache_hooks(decoder: TextDecoder | nn.Module, past: HookCache | None = None) -> Iterator[HookCache]:
    """`with install_kv_cache_hooks(decoder, past) as cache: logits = decoder(ids, xa)`

    Inside the context, each call of the decoder continues `cache`, which starts as a copy of `past`; `past` is not
    changed. `start_pos` is cache.length. A call with another start_pos or another xa raises InputError. The hooks act
    only in the thread that installed them, and are removed on exit, also after an error. They serve openai-whisper's
    own decoder, too, whose calls after the first are of one token each.
    """
    past = past or HookCache()
    cache, key = HookCache(dict(past.self_kv), dict(past.cross_kv), past.xa), (get_ident(), id(decoder))
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


def _in_own_thread(hook: Callable) -> Callable:
    """Let other threads pass: a hook that returns None changes nothing."""

    @wraps(hook)
    def guarded(self: "_Hooks", *args: Any) -> Any:
        return hook(self, *args) if get_ident() == self.thread else None

    return guarded


class _Hooks:
    """The hooks of one cache. What a call computes is pending until the decoder returns, then it is cached."""

    def __init__(self, cache: HookCache):
        self.cache, self.thread = cache, get_ident()
        self.pending: HookCache | None = None  # of the call in progress

    @_in_own_thread
    def begin_call(self, decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Pre-hook of the decoder: check that the call continues the cache, and fill in start_pos."""
        call = dict(zip(("x", "xa", "start_pos"), args), **kwargs)
        past = self.cache.length
        if call.setdefault("start_pos", past) != past:
            raise InputError(
                f"start_pos={call['start_pos']}, but the cache holds {past} tokens; leave start_pos out to continue "
                "them, or install the hooks without `past` to start again"
            )
        if self.cache.xa is not None and not _equal(self.cache.xa, call["xa"]):
            raise InputError(
                f"xa {tuple(call['xa'].shape)} is not the one whose keys and values are cached "
                f"{tuple(self.cache.xa.shape)}; leave the `with` and install the hooks without `past` for other inputs"
            )
        if "start_pos" not in signature(decoder.forward).parameters:  # openai-whisper's own decoder, which counts them
            del call["start_pos"]
            call["kv_cache"] = dict(self.cache.self_kv)
        xa = call["xa"].detach().clone() if self.cache.xa is None else self.cache.xa
        self.pending = HookCache(dict(self.cache.self_kv), dict(self.cache.cross_kv), xa)
        return (), call

    @_in_own_thread
    def end_call(self, decoder: nn.Module, args: tuple, output: Tensor) -> None:
        """Forward hook of the decoder: cache what the call computed."""
        pending, self.pending = self._call(), None
        self.cache.self_kv, self.cache.cross_kv, self.cache.xa = pending.self_kv, pending.cross_kv, pending.xa

    @_in_own_thread
    def append_self(self, linear: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Forward hook of self-attention: prepend the cached tokens to the new ones."""
        kv = self._call().self_kv
        if linear in kv:
            output = torch.cat([kv[linear], output], dim=1)
        kv[linear] = output.detach()
        return output

    @_in_own_thread
    def skip_cross(self, linear: nn.Module, args: tuple) -> tuple[Tensor] | None:
        """Forward pre-hook of cross-attention: pass an empty input once the output is cached."""
        return (args[0][:, :0],) if linear in self._call().cross_kv else None

    @_in_own_thread
    def store_cross(self, linear: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Forward hook of cross-attention: store the first output and return it from then on."""
        kv = self._call().cross_kv
        if linear in kv:
            return kv[linear]
        kv[linear] = output.detach()
        return output

    def _call(self) -> HookCache:
        if self.pending is None:
            raise RuntimeError("while hooks are installed, call the decoder itself: not its blocks, nor its `forward`")
        return self.pending


def _equal(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and torch.equal(a, b)
