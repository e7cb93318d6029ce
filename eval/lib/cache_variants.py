"""Every cache design of this repository, and none, as streams of the same greedy tokens.

A stream runs from the pixels to the last token. What does not depend on the image, such as an exported graph, is made
before.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eval.lib import flops
from eval.lib.cache_memory import kv_bytes
from models.decoding import TokenSampler, generate_tokens
from models.kv_study.encoder_decoder import EncoderDecoder, KVPair, TextPrefillState
from models.kv_study.hook_cache import install_kv_cache_hooks
from models.kv_study.static_cache import (
    LanguageModelStep,
    Programs,
    TextDecoderStep,
    export_language_model,
    export_text_decoder,
    language_model_cache,
    stream,
    text_decoder_cache,
)
from models.vision_language_model import PrefillState, VisionLanguageModel

UNCACHED = "no cache"
Step = Callable[..., Any]  # a module, or an exported graph of the same signature


@dataclass(frozen=True)
class CacheDesign:
    """stream(n) yields the n ids (1,) that follow the prompt, greedily, as they are chosen."""

    name: str
    stream: Callable[[int], Iterator[Tensor]]
    held: "HeldCache | None" = None  # what the last stream cached; None for a design that caches nothing
    read_cost: flops.ReadCost | None = None  # if it differs from the case's


@dataclass
class HeldCache:
    """The tensors that a design's last stream cached: of its tokens, and of the image for cross-attention."""

    tensors: list[Tensor] = field(default_factory=list)
    cross: list[Tensor] = field(default_factory=list)

    def keep_static(self, cache: list[KVPair], length: int, cross: list[KVPair] | None = None) -> None:
        """Keep the first `length` tokens of a static cache."""
        self.tensors = [tensor[:, :, :length] for pair in cache for tensor in pair]
        self.cross = [tensor for pair in cross or [] for tensor in pair]


@dataclass(frozen=True)
class StudyCase:
    """A model with an image and a prompt: its stages, the theoretical cost of reading, and its cache designs."""

    name: str
    model: nn.Module
    prompt_tokens: int
    vision: Callable[[], object]  # pixels to image embeddings
    prefill: Callable[[], object]  # embeddings to the first token, with a cache
    read_cost: flops.ReadCost
    designs: list[CacheDesign]
    kv_bytes: Callable[[int], int] = lambda tokens: 0  # of so many tokens, by the formula


def language_model(
    model: VisionLanguageModel, ids: Tensor, images: Tensor, max_new_tokens: int, export: bool = True
) -> StudyCase:
    """The product's model on a prompt, ids (1, T) with image tokens, for up to max_new_tokens."""
    decoder, capacity = model.decoder, ids.size(1) + max_new_tokens
    mask = ids.new_ones(1, capacity)
    with torch.inference_mode():
        x = model.embed(ids, images)

    def per_block(held: HeldCache, n: int) -> Iterator[Tensor]:
        states: deque[PrefillState] = deque(maxlen=1)
        yield from model.stream(ids, images, max_new_tokens=n, on_state=states.append)
        held.tensors = [tensor for kv in states[0].kv_cache for tensor in (kv.key, kv.value)]

    def static(prefill: Step, decode: Step, held: HeldCache, n: int) -> Iterator[Tensor]:
        cache = language_model_cache(decoder, 1, capacity)
        held.keep_static(cache, ids.size(1) + n - 1)
        yield from stream(
            lambda x, start: prefill(x, mask, start, cache),
            lambda ids, start: decode(ids, mask, start, cache),
            model.embed(ids, images),
            max_new_tokens=n,
        )

    step = LanguageModelStep(decoder)
    designs = [
        CacheDesign(UNCACHED, lambda n: model.stream(ids, images, max_new_tokens=n, use_kv_cache=False)),
        _holding("per-block cache", per_block),
        _holding("static cache", partial(static, step, step)),
    ]
    if export:
        prefill, decode = _modules(export_language_model(decoder, capacity), "prefill", "decode")
        designs.append(_holding("static, exported", partial(static, prefill, decode)))
    return StudyCase(
        "language model on image and text",
        model,
        ids.size(1),
        lambda: model.MP(model.vision_encoder(images)),
        lambda: decoder.head(decoder(x)[0][:, -1]),
        flops.language_model(model.cfg),
        designs,
        lambda tokens: kv_bytes(
            model.cfg.lm_n_blocks, model.cfg.lm_n_kv_heads, model.cfg.lm_head_dim, tokens, 1, model.dtype.itemsize
        ),
    )


def encoder_decoder(
    model: EncoderDecoder, ids: Tensor, images: Tensor, max_new_tokens: int, export: bool = True
) -> StudyCase:
    """The encoder-decoder on a prompt, ids (1, T), about one image, for up to max_new_tokens."""
    decoder, capacity = model.decoder, ids.size(1) + max_new_tokens
    with torch.inference_mode():
        xa = model.encode(images)

    def hooks(held: HeldCache, n: int) -> Iterator[Tensor]:
        xa = model.encode(images)
        with install_kv_cache_hooks(decoder) as cache:
            yield from generate_tokens(
                decoder(ids, xa)[:, -1],
                lambda new: decoder(new[:, None], xa)[:, -1],
                TokenSampler(),
                n,
            )
            held.tensors, held.cross = list(cache.self_kv.values()), list(cache.cross_kv.values())

    def per_block(once: bool, held: HeldCache, n: int) -> Iterator[Tensor]:
        """Cached self-attention; the image's keys and values are made once, or again for every token."""
        xa = model.encode(images)
        state = TextPrefillState(decoder.project_cross_kv(xa))

        def read(new: Tensor) -> Tensor:
            nonlocal state
            if not once and state.self_kv:
                state = TextPrefillState(decoder.project_cross_kv(xa), state.self_kv)
            x, state = decoder.forward_cached(new, state)
            return decoder.logits(x[:, -1])

        yield from generate_tokens(read(ids), lambda new: read(new[:, None]), TokenSampler(), n)
        held.tensors = [tensor for kv in state.self_kv or [] for tensor in (kv.key, kv.value)]
        held.cross = [tensor for pair in state.cross_kv for tensor in pair] if once else []

    def static(make_cross: Step, prefill: Step, decode: Step, held: HeldCache, n: int) -> Iterator[Tensor]:
        cache, cross = text_decoder_cache(decoder, 1, capacity), make_cross(model.encode(images))
        held.keep_static(cache, ids.size(1) + n - 1, cross)
        yield from stream(
            lambda ids, start: prefill(ids, start, cross, cache),
            lambda ids, start: decode(ids, start, cross, cache),
            ids,
            max_new_tokens=n,
        )

    step = TextDecoderStep(decoder)
    designs = [
        CacheDesign(UNCACHED, lambda n: model.stream(ids, images, max_new_tokens=n, use_kv_cache=False)),
        _holding("hooks", hooks),
        replace(
            _holding("cross recomputed", partial(per_block, False)),
            read_cost=flops.text_decoder(model.cfg, xa.size(1), cross_once=False),
        ),
        _holding("cross-attention once", partial(per_block, True)),
        _holding("static cache", partial(static, decoder.project_cross_kv, step, step)),
    ]
    if export:
        programs = export_text_decoder(decoder, capacity)
        make_cross, prefill, decode = _modules(programs, "cross", "prefill", "decode")
        designs.append(_holding("static, exported", partial(static, make_cross, prefill, decode)))
    return StudyCase(
        "encoder-decoder of the same size",
        model,
        ids.size(1),
        lambda: model.encode(images),
        lambda: decoder.logits(decoder.forward_cached(ids, TextPrefillState(decoder.project_cross_kv(xa)))[0][:, -1]),
        flops.text_decoder(model.cfg, xa.size(1)),
        designs,
        lambda tokens: kv_bytes(
            len(decoder.blocks), decoder.blocks[0].attn.n_head, xa.size(2) // decoder.blocks[0].attn.n_head,
            tokens, 1, xa.element_size(),
        ),
    )  # fmt: skip


def _holding(name: str, run: Callable[[HeldCache, int], Iterator[Tensor]]) -> CacheDesign:
    """A design whose stream leaves its cache in a HeldCache."""
    held = HeldCache()
    return CacheDesign(name, partial(run, held), held)


def _modules(programs: Programs, *names: str) -> list[nn.Module]:
    return [programs[name].module() for name in names]
