"""Every cache design of this repository, and none, behind one interface: start a generation, then append tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.kv_study import sliding_window
from models.kv_study.block_cache import BlockCache, block_caches, prefill_state
from models.kv_study.cross_attention import KVPair
from models.kv_study.encoder_decoder import EncoderDecoder
from models.kv_study.eviction import EvictingKV, Policy, observed
from models.kv_study.hook_cache import HookCache, install_kv_cache_hooks
from models.kv_study.paged_cache import BlockPool, PagedKV
from models.kv_study.quantized_cache import QuantizedKV
from models.kv_study.sliding_window import SlidingWindowKV
from models.kv_study.static_cache import LanguageModelStep, TextDecoderStep, language_model_cache, text_decoder_cache
from models.kv_study.static_export import export_language_model, export_text_decoder
from models.vision_language_model import VisionLanguageModel

UNCACHED = "no cache"
BLOCK_SIZE = 16  # tokens of a paged block, as in vLLM
Images = Tensor | None
Read = Callable[[Tensor], Tensor]  # the next tokens, ids or embeddings (B, T, ...), to the next logits (B, V)
Start = Callable[[Tensor, Any], "Run"]  # of ids (B, T) and images
Programs = Sequence[Callable]


@dataclass
class Run:
    """A generation in progress: the next logits (B, V), how to append ids (B,), and the bytes of what is cached."""

    logits: Tensor
    step: Callable[[Tensor], Tensor]
    bytes_used: Callable[[], int] = lambda: 0  # keys and values of the text's tokens
    cross: Sequence[KVPair] = ()  # keys and values of the image, for cross-attention


@dataclass(frozen=True)
class Design:
    """A cache design; start(ids (B, T), images) prefills, images encoded."""

    name: str
    start: Start
    is_rounded: bool = False  # whether it may choose other ids than its reference
    reference: Start | None = None  # whose ids are expected; by default those without a cache


def sum_bytes(caches: Sequence[BlockCache]) -> int:
    return sum(kv.bytes_used for kv in caches)


def uncached(next_logits: Read) -> Read:
    """Compute all tokens so far again."""
    seen: list[Tensor] = []

    def read(x: Tensor) -> Tensor:
        seen.append(x)
        return next_logits(torch.cat(seen, 1))

    return read


def continued(model: VisionLanguageModel | EncoderDecoder, logits: Tensor, state: Any, cross: Any = ()) -> Run:
    """Decode from a state of the model, whose self-attention has one cache per block."""

    def step(new: Tensor) -> Tensor:
        nonlocal state
        logits, state = model.decode(new, state)
        return logits

    caches = "self_kv" if isinstance(model, EncoderDecoder) else "kv_cache"
    return Run(logits, step, lambda: sum_bytes(getattr(state, caches)), cross)


def static(programs: Programs, x: Tensor, kv: list[KVPair], cross: Sequence[KVPair] = ()) -> Run:
    """Prefill x and decode ids by two programs of (tokens, position ()) on a cache of fixed capacity, kv."""
    (prefill, decode), length = programs, x.size(1)
    bytes_per_token = sum(tensor.nbytes for pair in kv for tensor in pair) // kv[0][0].size(2)

    def step(new: Tensor) -> Tensor:
        nonlocal length
        logits, length = decode(new[:, None], torch.tensor(length, device=x.device)), length + 1
        return logits

    return Run(prefill(x, torch.tensor(0, device=x.device)), step, lambda: bytes_per_token * length, cross)


# The product's language model


def embedded(
    model: VisionLanguageModel, read: Read, ids: Tensor, images: Images, caches: Sequence[BlockCache] = ()
) -> Run:
    """Read the prompt's embeddings and then those of one id after the other."""
    step = lambda new: read(model.embed_tokens(new[:, None]))  # noqa: E731
    return Run(read(model.embed(ids, images)), step, partial(sum_bytes, caches))


def blocks(model: VisionLanguageModel, make: Callable[[], BlockCache] | None, ids: Tensor, images: Images) -> Run:
    """The product's prefill and decode, on other caches if given: make is called for each block."""
    prefix = make and prefill_state([make() for _ in model.decoder.blocks])
    return continued(model, *model.prefill(ids, images, None, prefix))


def paged(model: VisionLanguageModel, capacity: int, ids: Tensor, images: Images) -> Run:
    n_blocks = len(ids) * -(-capacity // BLOCK_SIZE)
    return blocks(model, lambda: PagedKV(BlockPool(n_blocks, BLOCK_SIZE)), ids, images)


def evicting(model: VisionLanguageModel, policy: Policy, share: float, ids: Tensor, images: Images) -> Run:
    """Not one of `language_model_designs`, which promise the tokens of no cache."""
    caches = [EvictingKV(policy, share) for _ in model.decoder.blocks]

    def read(x: Tensor) -> Tensor:
        with observed(model.decoder, caches):
            hidden, _ = model.decoder(x, None, block_caches(caches), caches[0].length)
        return model.decoder.head(hidden[:, -1])

    return embedded(model, read, ids, images, caches)


def windowed(model: VisionLanguageModel, window: int, ids: Tensor, images: Images) -> Run:
    decoder, kv = model.decoder, [SlidingWindowKV(window) for _ in model.decoder.blocks]
    read = lambda x: decoder.head(sliding_window.forward(decoder, x, window, 0, kv)[:, -1])  # noqa: E731
    return embedded(model, read, ids, images, kv)


def masked(model: VisionLanguageModel, window: int, ids: Tensor, images: Images) -> Run:
    """No cache under the window's mask: the definition of a sliding window."""
    decoder = model.decoder
    read = uncached(lambda x: decoder.head(sliding_window.forward(decoder, x, window)[:, -1]))
    return embedded(model, read, ids, images)


def fixed(model: VisionLanguageModel, programs: Programs, capacity: int, ids: Tensor, images: Images) -> Run:
    """Two programs, exported or not, on a static cache."""
    kv, mask = language_model_cache(model.decoder, len(ids), capacity), ids.new_ones(len(ids), capacity)
    bound = [lambda x, start, program=program: program(x, mask, start, kv) for program in programs]
    return static(bound, model.embed(ids, images), kv)


def language_model_designs(model: VisionLanguageModel, capacity: int, window: int, export: bool) -> list[Design]:
    """The designs of the product's language model, for sequences of up to capacity tokens."""
    programs: Programs = [LanguageModelStep(model.decoder)] * 2

    def plain(ids: Tensor, images: Images) -> Run:
        return embedded(model, uncached(lambda x: model.prefill_embeds(x)[0]), ids, images)

    designs = [
        Design(UNCACHED, plain),
        Design("per-block cache", partial(blocks, model, None)),
        Design("static cache", partial(fixed, model, programs, capacity)),
        Design("paged blocks", partial(paged, model, capacity)),
        Design("int8 cache", partial(blocks, model, QuantizedKV), is_rounded=True),
        Design(f"sliding window, {window}", partial(windowed, model, window),
               reference=partial(masked, model, window)),
    ]  # fmt: skip
    if export:
        programs = [program.module() for program in export_language_model(model.decoder, capacity).values()]
        designs.insert(3, Design("static, exported", partial(fixed, model, programs, capacity)))
    return designs


# The encoder-decoder


def hooked(model: EncoderDecoder, ids: Tensor, images: Tensor) -> Run:
    past, xa = HookCache(), model.encode(images)

    def read(ids: Tensor) -> Tensor:
        nonlocal past
        with install_kv_cache_hooks(model.decoder, past) as past:
            return model.decoder(ids, xa)[:, -1]

    logits, cross = read(ids), list(past.cross_kv.values())
    used = lambda: sum(tensor.nbytes for tensor in past.self_kv.values())  # noqa: E731
    return Run(logits, lambda new: read(new[:, None]), used, [*zip(cross[::2], cross[1::2])])


def crossed(model: EncoderDecoder, ids: Tensor, images: Tensor) -> Run:
    logits, state = model.prefill(ids, images)
    return continued(model, logits, state, state.cross_kv)


def fixed_twin(model: EncoderDecoder, programs: Programs, capacity: int, ids: Tensor, images: Tensor) -> Run:
    """Three programs, exported or not, on a static cache; the first projects the encoded images."""
    project, *steps = programs
    kv, cross = text_decoder_cache(model.decoder, len(ids), capacity), project(model.encode(images))
    bound = [lambda x, start, program=program: program(x, start, cross, kv) for program in steps]
    return static(bound, ids, kv, cross)


def encoder_decoder_designs(model: EncoderDecoder, capacity: int, export: bool) -> list[Design]:
    """The designs of the encoder-decoder, one image per sequence, for sequences of up to capacity tokens."""
    decoder = model.decoder
    programs: Programs = [decoder.project_cross_kv, *[TextDecoderStep(decoder)] * 2]

    def plain(ids: Tensor, images: Tensor) -> Run:
        xa = model.encode(images)
        read = uncached(lambda ids: decoder(ids, xa)[:, -1])
        return Run(read(ids), lambda new: read(new[:, None]))

    designs = [
        Design(UNCACHED, plain),
        Design("hooks", partial(hooked, model)),
        Design("cross-attention once", partial(crossed, model)),
        Design("static cache", partial(fixed_twin, model, programs, capacity)),
    ]
    if export:
        programs = [program.module() for program in export_text_decoder(decoder, capacity).values()]
        designs.append(Design("static, exported", partial(fixed_twin, model, programs, capacity)))
    return designs
