"""Every cache design of this repository, and none, behind one interface: start a generation, then append tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from eval.lib import flops
from models.cache import storage_bytes
from models.kv_study import sliding_window
from models.kv_study.block_cache import BlockCache, block_caches, prefill_state
from models.kv_study.encoder_decoder import EncoderDecoder, KVPair, TextPrefillState
from models.kv_study.hook_cache import HookCache, install_kv_cache_hooks
from models.kv_study.int8_cache import Int8KV
from models.kv_study.paged_cache import BlockPool, PagedKV
from models.kv_study.sliding_window import SlidingWindowKV
from models.kv_study.static_cache import (
    LanguageModelStep,
    TextDecoderStep,
    export_language_model,
    export_text_decoder,
    language_model_cache,
    text_decoder_cache,
)
from models.vision_language_model import VisionLanguageModel

UNCACHED = "no cache"
BLOCK_SIZE = 16  # tokens of a paged block, as in vLLM
Images = Tensor | None
Program = Callable[[Tensor, Tensor], Tensor]  # x (B, T, ...) and its position () to the next logits


@dataclass
class Run:
    """A generation in progress: the next logits (B, V), how to append ids (B,), and the bytes of what is cached."""

    logits: Tensor
    step: Callable[[Tensor], Tensor]
    bytes_used: Callable[[], int] = lambda: 0  # keys and values of the text's tokens
    cross: Sequence[Tensor] = ()  # keys and values of the image, for cross-attention


@dataclass(frozen=True)
class Design:
    """A cache design; start(ids (B, T), images) prefills, images encoded."""

    name: str
    start: Callable[[Tensor, Images], Run]
    cost: flops.ReadCost
    fork: str = "copy"  # how several continuations of one prefill come about
    export: bool = False  # whether torch.export makes graphs of it
    chunk: bool = True  # whether a prompt can be read in parts
    exact: str = "yes"
    reference: Callable[[Tensor, Images], Run] | None = None  # whose ids are expected; by default those without a cache


def sum_bytes(caches: Sequence[BlockCache]) -> int:
    return sum(kv.bytes_used for kv in caches)


def uncached(embed: Callable[[Tensor], Tensor], next_logits: Callable[[Tensor], Tensor], x: Tensor) -> Run:
    """Recompute all tokens, x (B, T, ...), for each new one, of which embed makes one more column."""

    def step(new: Tensor) -> Tensor:
        nonlocal x
        x = torch.cat([x, embed(new[:, None])], 1)
        return next_logits(x)

    return Run(next_logits(x), step)


def static(programs: Sequence[Program], x: Tensor, kv: list[KVPair], cross: Sequence[KVPair] = ()) -> Run:
    """Prefill x (B, T, ...) and decode by two programs on a cache of fixed capacity."""
    (prefill, decode), length, capacity = programs, x.size(1), kv[0][0].size(2)

    def step(new: Tensor) -> Tensor:
        nonlocal length
        logits, length = decode(new[:, None], torch.tensor(length, device=x.device)), length + 1
        return logits

    size = sum(tensor.nbytes for pair in kv for tensor in pair)
    first = prefill(x, torch.tensor(0, device=x.device))
    return Run(first, step, lambda: size * length // capacity, [tensor for pair in cross for tensor in pair])


def blocks(
    model: VisionLanguageModel, make: Callable[[int], list[BlockCache]], reorder: bool, ids: Tensor, images: Images
) -> Run:
    """The product's prefill and decode on other caches, one per block; reorder copies rows at each step, as beams."""
    logits, state = model.prefill(ids, images, None, prefill_state(kv) if (kv := make(len(ids))) else None)
    order = torch.arange(len(ids), device=ids.device)

    def step(new: Tensor) -> Tensor:
        nonlocal state
        logits, state = model.decode(new, state.rows(order) if reorder else state)
        return logits

    return Run(logits, step, lambda: sum_bytes(state.kv_cache))


def windowed(model: VisionLanguageModel, window: int, ids: Tensor, images: Images) -> Run:
    decoder, kv = model.decoder, [SlidingWindowKV(window) for _ in model.decoder.blocks]
    hidden = sliding_window.forward(decoder, model.embed(ids, images), window, 0, kv)

    def step(new: Tensor) -> Tensor:
        hidden, _ = decoder(model.embed_tokens(new[:, None]), None, block_caches(kv), kv[0].length)
        return decoder.head(hidden[:, -1])

    return Run(decoder.head(hidden[:, -1]), step, lambda: sum_bytes(kv))


def masked(model: VisionLanguageModel, window: int, ids: Tensor, images: Images) -> Run:
    """No cache under the window's mask: the definition of a sliding window."""
    decoder = model.decoder
    forward = partial(sliding_window.forward, decoder, window=window)
    return uncached(model.embed_tokens, lambda x: decoder.head(forward(x)[:, -1]), model.embed(ids, images))


def fixed(
    model: VisionLanguageModel, programs: tuple[nn.Module, nn.Module], capacity: int, ids: Tensor, images: Images
) -> Run:
    """Two programs, exported or not, on a static cache."""
    kv, mask = language_model_cache(model.decoder, len(ids), capacity), ids.new_ones(len(ids), capacity)
    bound = [lambda x, start, program=program: program(x, mask, start, kv) for program in programs]
    return static(bound, model.embed(ids, images), kv)


def language_model_designs(model: VisionLanguageModel, capacity: int, window: int, export: bool) -> list[Design]:
    """The designs of the product's language model, for sequences of up to capacity tokens."""
    decoder, n_blocks = model.decoder, len(model.decoder.blocks)
    cost, window_cost = flops.language_model(model.cfg), flops.language_model(model.cfg, window)

    def plain(ids: Tensor, images: Images) -> Run:
        return uncached(model.embed_tokens, lambda x: model.prefill_embeds(x)[0], model.embed(ids, images))

    def paged(batch: int) -> list[BlockCache]:
        return [PagedKV(BlockPool(batch * -(-capacity // BLOCK_SIZE), BLOCK_SIZE)) for _ in range(n_blocks)]

    def int8(batch: int) -> list[BlockCache]:
        return [Int8KV() for _ in range(n_blocks)]

    def none(batch: int) -> list[BlockCache]:
        return []

    step, name = LanguageModelStep(decoder), f"sliding window, {window}"
    reference = partial(masked, model, window)
    designs = [
        Design(UNCACHED, plain, cost, fork="yes", chunk=False),
        Design("per-block cache", partial(blocks, model, none, False), cost, fork="yes"),
        Design("  reordered, as beams", partial(blocks, model, none, True), cost, fork="yes"),
        Design("static cache", partial(fixed, model, (step, step), capacity), cost, fork="no", export=True),
        Design("paged blocks", partial(blocks, model, paged, False), cost, fork="shared"),
        Design("int8 cache", partial(blocks, model, int8, False), cost, fork="yes", exact="rounded"),
        Design(name, partial(windowed, model, window), window_cost, exact="as mask", reference=reference),
    ]
    if export:
        graphs = export_language_model(decoder, capacity)
        start = partial(fixed, model, (graphs["prefill"].module(), graphs["decode"].module()), capacity)
        designs.insert(4, Design("static, exported", start, cost, fork="no", export=True))
    return designs


def encoder_decoder_designs(model: EncoderDecoder, capacity: int, n_patches: int, export: bool) -> list[Design]:
    """The designs of the encoder-decoder, one image per sequence, for sequences of up to capacity tokens."""
    decoder, cost = model.decoder, flops.text_decoder(model.cfg, n_patches)

    def encoded(images: Images) -> Tensor:
        assert images is not None
        return model.encode(images)

    def plain(ids: Tensor, images: Images) -> Run:
        xa = encoded(images)
        return uncached(lambda new: new, lambda ids: decoder(ids, xa)[:, -1], ids)

    def hooks(ids: Tensor, images: Images) -> Run:
        past, xa = HookCache(), encoded(images)

        def read(ids: Tensor) -> Tensor:
            nonlocal past
            with install_kv_cache_hooks(decoder, past) as past:
                return decoder(ids, xa)[:, -1]

        logits = read(ids)
        used = lambda: sum(tensor.nbytes for tensor in past.self_kv.values())  # noqa: E731
        return Run(logits, lambda new: read(new[:, None]), used, list(past.cross_kv.values()))

    def per_block(once: bool, ids: Tensor, images: Images) -> Run:
        """Cached self-attention; the image's keys and values are computed once, or again for every token."""
        xa = encoded(images)
        state = TextPrefillState(decoder.project_cross_kv(xa))

        def read(new: Tensor) -> Tensor:
            nonlocal state
            if not once and state.self_kv:
                state = TextPrefillState(decoder.project_cross_kv(xa), state.self_kv)
            x, state = decoder.forward_cached(new, state)
            return decoder.logits(x[:, -1])

        logits, cross = read(ids), [tensor for pair in state.cross_kv if once for tensor in pair]
        return Run(logits, lambda new: read(new[:, None]), lambda: sum_bytes(state.self_kv or []), cross)

    def fixed_size(
        make_cross: Callable[[Tensor], list[KVPair]], prefill: nn.Module, decode: nn.Module, ids: Tensor, images: Images
    ) -> Run:
        kv, cross = text_decoder_cache(decoder, len(ids), capacity), make_cross(encoded(images))
        bound = [lambda x, start, program=program: program(x, start, cross, kv) for program in (prefill, decode)]
        return static(bound, ids, kv, cross)

    step, recomputed = TextDecoderStep(decoder), flops.text_decoder(model.cfg, n_patches, cross_once=False)
    designs = [
        Design(UNCACHED, plain, cost, fork="yes", chunk=False),
        Design("hooks", hooks, cost, fork="yes"),
        Design("cross recomputed", partial(per_block, False), recomputed, fork="yes"),
        Design("cross-attention once", partial(per_block, True), cost, fork="yes"),
        Design("static cache", partial(fixed_size, decoder.project_cross_kv, step, step), cost, fork="no", export=True),
    ]
    if export:
        programs = {name: program.module() for name, program in export_text_decoder(decoder, capacity).items()}
        start = partial(fixed_size, programs["cross"], programs["prefill"], programs["decode"])
        designs.append(Design("static, exported", start, cost, fork="no", export=True))
    return designs


def cross_bytes(run: Run) -> int:
    """Bytes of the image's keys and values that a run keeps."""
    return storage_bytes(run.cross)
