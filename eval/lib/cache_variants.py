"""Every cache design of this repository, and none, as streams of the same greedy tokens.

A stream runs from the pixels to the last token. What does not depend on the image, such as an exported graph, is made
before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eval.lib import flops
from models.decoding import GREEDY, generate_tokens
from models.kv_study.encoder_decoder import EncoderDecoder, TextPrefillState
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
from models.vision_language_model import VisionLanguageModel

UNCACHED = "no cache"
Step = Callable[..., Any]  # a module, or an exported graph of the same signature


@dataclass(frozen=True)
class CacheDesign:
    """stream(n) yields the n ids (1,) that follow the prompt, greedily, as they are chosen."""

    name: str
    stream: Callable[[int], Iterator[Tensor]]


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


def language_model(
    model: VisionLanguageModel, ids: Tensor, images: Tensor, max_new_tokens: int, export: bool = True
) -> StudyCase:
    """The product's model on a prompt, ids (1, T) with image tokens, for up to max_new_tokens."""
    decoder, capacity = model.decoder, ids.size(1) + max_new_tokens
    mask = ids.new_ones(1, capacity)
    with torch.inference_mode():
        x = model.embed(ids, images)

    def static(prefill: Step, decode: Step, n: int) -> Iterator[Tensor]:
        cache = language_model_cache(decoder, 1, capacity)
        yield from stream(
            lambda x, start: prefill(x, mask, start, cache),
            lambda ids, start: decode(ids, mask, start, cache),
            model.embed(ids, images),
            max_new_tokens=n,
        )

    step = LanguageModelStep(decoder)
    designs = [
        CacheDesign(UNCACHED, lambda n: model.stream(ids, images, max_new_tokens=n, use_kv_cache=False)),
        CacheDesign("per-block cache", lambda n: model.stream(ids, images, max_new_tokens=n)),
        CacheDesign("static cache", partial(static, step, step)),
    ]
    if export:
        prefill, decode = _modules(export_language_model(decoder, capacity), "prefill", "decode")
        designs.append(CacheDesign("static, exported", partial(static, prefill, decode)))
    return StudyCase(
        "language model on image and text",
        model,
        ids.size(1),
        lambda: model.MP(model.vision_encoder(images)),
        lambda: decoder.head(decoder(x)[0][:, -1]),
        flops.language_model(model.cfg),
        designs,
    )


def encoder_decoder(
    model: EncoderDecoder, ids: Tensor, images: Tensor, max_new_tokens: int, export: bool = True
) -> StudyCase:
    """The encoder-decoder on a prompt, ids (1, T), about one image, for up to max_new_tokens."""
    decoder, capacity = model.decoder, ids.size(1) + max_new_tokens
    with torch.inference_mode():
        xa = model.encode(images)

    def hooks(n: int) -> Iterator[Tensor]:
        xa = model.encode(images)
        with install_kv_cache_hooks(decoder):
            yield from generate_tokens(
                decoder(ids, xa)[:, -1],
                lambda new: decoder(new[:, None], xa)[:, -1],
                sampling=GREEDY,
                max_new_tokens=n,
            )

    def static(make_cross: Step, prefill: Step, decode: Step, n: int) -> Iterator[Tensor]:
        cache, cross = text_decoder_cache(decoder, 1, capacity), make_cross(model.encode(images))
        yield from stream(
            lambda ids, start: prefill(ids, start, cross, cache),
            lambda ids, start: decode(ids, start, cross, cache),
            ids,
            max_new_tokens=n,
        )

    step = TextDecoderStep(decoder)
    designs = [
        CacheDesign(UNCACHED, lambda n: model.stream(ids, images, max_new_tokens=n, use_kv_cache=False)),
        CacheDesign("hooks", hooks),
        CacheDesign("cross-attention once", lambda n: model.stream(ids, images, max_new_tokens=n)),
        CacheDesign("static cache", partial(static, decoder.project_cross_kv, step, step)),
    ]
    if export:
        programs = export_text_decoder(decoder, capacity)
        make_cross, prefill, decode = _modules(programs, "cross", "prefill", "decode")
        designs.append(CacheDesign("static, exported", partial(static, make_cross, prefill, decode)))
    return StudyCase(
        "encoder-decoder of the same size",
        model,
        ids.size(1),
        lambda: model.encode(images),
        lambda: decoder.logits(decoder.forward_cached(ids, TextPrefillState(decoder.project_cross_kv(xa)))[0][:, -1]),
        flops.text_decoder(model.cfg, xa.size(1)),
        designs,
    )


def _modules(programs: Programs, *names: str) -> list[nn.Module]:
    return [programs[name].module() for name in names]
