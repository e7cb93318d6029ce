"""Memory and time of every cache design in this repository, and of no cache, behind one interface.

`eval.speedup` is the command. A generation runs from the pixels to its last token, in one run for all lengths; its end
token is ignored. All designs run in interleaved rounds. The ids that a design chooses are compared with those without a
cache; for the sliding window, with those under the same window mask without a cache.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eval.lib.command import count_flops, interleave, measure_seconds, progress, synchronize
from models.cache import storage_bytes
from models.kv_study import sliding_window
from models.kv_study.block_cache import BlockCache, block_caches, prefill_state
from models.kv_study.cross_attention import KVPair
from models.kv_study.encoder_decoder import EncoderDecoder
from models.kv_study.eviction import EvictingKV, Policy, observed
from models.kv_study.hook_cache import HookCache, install_kv_cache_hooks
from models.kv_study.paged_cache import BlockPool, PagedKV
from models.kv_study.quantized_cache import QuantizedKV
from models.kv_study.sliding_window import SlidingWindowKV
from models.kv_study.static_cache import LanguageModelStep, language_model_cache
from models.kv_study.static_export import export_language_model
from models.vision_language_model import VisionLanguageModel
from nanovlm.console import table

UNCACHED = "no cache"
BLOCK_SIZE = 16  # tokens of a paged block, as in vLLM
NextLogits = Callable[[Tensor], Tensor]  # the next tokens, ids or embeddings (B, T, ...), to the next logits (B, V)
Start = Callable[[Tensor, Any], "Run"]  # of ids (B, T) and images


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


def uncached(next_logits: NextLogits) -> NextLogits:
    """Compute all tokens so far again."""
    seen: list[Tensor] = []

    def read(x: Tensor) -> Tensor:
        seen.append(x)
        return next_logits(torch.cat(seen, 1))

    return read


def continued(model: VisionLanguageModel | EncoderDecoder, logits: Tensor, state: Any, caches: str, cross=()) -> Run:
    """Decode from a state of the model, whose attribute `caches` is one cache per block."""

    def step(new: Tensor) -> Tensor:
        nonlocal state
        logits, state = model.decode(new, state)
        return logits

    return Run(logits, step, lambda: sum(kv.bytes_used for kv in getattr(state, caches)), cross)


def embedded(
    model: VisionLanguageModel, read: NextLogits, ids: Tensor, images: Tensor | None, caches: Sequence[BlockCache] = ()
) -> Run:
    """Read the embeddings of the language model's prompt and then those of one id after the other."""
    step = lambda new: read(model.embed_tokens(new[:, None]))  # noqa: E731
    return Run(read(model.embed(ids, images)), step, lambda: sum(kv.bytes_used for kv in caches))


def blocks(
    model: VisionLanguageModel, make: Callable[[], BlockCache] | None, ids: Tensor, images: Tensor | None
) -> Run:
    """The product's prefill and decode, on other caches if given: make is called for each block."""
    prefix = make and prefill_state([make() for _ in model.decoder.blocks])
    return continued(model, *model.prefill(ids, images, None, prefix), "kv_cache")


def evicting(model: VisionLanguageModel, policy: Policy, share: float, ids: Tensor, images: Tensor | None) -> Run:
    """Decode with an evicting cache; it is not in `language_model_designs`, whose tokens are those of no cache."""
    caches = [EvictingKV(policy, share) for _ in model.decoder.blocks]

    def read(x: Tensor) -> Tensor:
        with observed(model.decoder, caches):
            hidden, _ = model.decoder(x, None, block_caches(caches), caches[0].length)
        return model.decoder.head(hidden[:, -1])

    return embedded(model, read, ids, images, caches)


def language_model_designs(model: VisionLanguageModel, capacity: int, window: int, export: bool) -> list[Design]:
    """The designs of the product's language model, for sequences of up to capacity tokens."""
    decoder = model.decoder

    def plain(ids: Tensor, images: Tensor) -> Run:
        return embedded(model, uncached(lambda x: model.prefill_embeds(x)[0]), ids, images)

    def fixed(programs: Sequence[Callable], ids: Tensor, images: Tensor) -> Run:
        """Prefill and decode by two programs, exported or not, on a static cache."""
        prefill, decode = programs
        kv = language_model_cache(decoder, len(ids), capacity)
        mask = ids.new_ones(len(ids), capacity)
        bytes_per_token = sum(tensor.nbytes for pair in kv for tensor in pair) // capacity
        length = ids.size(1)

        def step(new: Tensor) -> Tensor:
            nonlocal length
            logits = decode(new[:, None], mask, torch.tensor(length, device=new.device), kv)
            length += 1
            return logits

        logits = prefill(model.embed(ids, images), mask, torch.tensor(0, device=ids.device), kv)
        return Run(logits, step, lambda: bytes_per_token * length)

    def paged(ids: Tensor, images: Tensor) -> Run:
        n_blocks = len(ids) * -(-capacity // BLOCK_SIZE)
        return blocks(model, lambda: PagedKV(BlockPool(n_blocks, BLOCK_SIZE)), ids, images)

    def windowed(ids: Tensor, images: Tensor) -> Run:
        kv = [SlidingWindowKV(window) for _ in decoder.blocks]
        read = lambda x: decoder.head(sliding_window.forward(decoder, x, window, 0, kv)[:, -1])  # noqa: E731
        return embedded(model, read, ids, images, kv)

    def masked(ids: Tensor, images: Tensor) -> Run:
        """No cache under the window's mask: the definition of a sliding window."""
        read = uncached(lambda x: decoder.head(sliding_window.forward(decoder, x, window)[:, -1]))
        return embedded(model, read, ids, images)

    designs = [
        Design(UNCACHED, plain),
        Design("per-block cache", partial(blocks, model, None)),
        Design("static cache", partial(fixed, [LanguageModelStep(decoder)] * 2)),
        Design("paged blocks", paged),
        Design("int8 cache", partial(blocks, model, QuantizedKV), is_rounded=True),
        Design(f"sliding window, {window}", windowed, reference=masked),
    ]
    if export:
        programs = [program.module() for program in export_language_model(decoder, capacity).values()]
        designs.insert(3, Design("static, exported", partial(fixed, programs)))
    return designs


def encoder_decoder_designs(model: EncoderDecoder) -> list[Design]:
    """The designs of the encoder-decoder, one image per sequence."""
    decoder = model.decoder

    def plain(ids: Tensor, images: Tensor) -> Run:
        xa = model.encode(images)
        read = uncached(lambda ids: decoder(ids, xa)[:, -1])
        return Run(read(ids), lambda new: read(new[:, None]))

    def hooked(ids: Tensor, images: Tensor) -> Run:
        past = HookCache()
        xa = model.encode(images)

        def read(ids: Tensor) -> Tensor:
            nonlocal past
            with install_kv_cache_hooks(decoder, past) as past:
                return decoder(ids, xa)[:, -1]

        logits = read(ids)
        cross = list(past.cross_kv.values())
        used = lambda: sum(tensor.nbytes for tensor in past.self_kv.values())  # noqa: E731
        return Run(logits, lambda new: read(new[:, None]), used, [*zip(cross[::2], cross[1::2])])

    def crossed(ids: Tensor, images: Tensor) -> Run:
        logits, state = model.prefill(ids, images)
        return continued(model, logits, state, "self_kv", state.cross_kv)

    return [Design(UNCACHED, plain), Design("hooks", hooked), Design("cross-attention once", crossed)]


@dataclass(frozen=True)
class Sizes:
    """Generations of these lengths, the sliding window, and interleaved rounds."""

    lengths: Sequence[int]
    window: int = 64
    rounds: int = 5


@dataclass(frozen=True)
class Row:
    """Results of one design; times in milliseconds."""

    design: str
    total_ms: list[float]  # of a generation, median per length
    spread_ms: list[float]  # half of slowest - fastest
    token_ms: float  # per token after the first, over the longest generation
    exponent: float  # growth of the time after the first token, between the last two lengths
    flops: list[int]  # per length: those of matmuls and attention, as PyTorch counts them, the image's among them
    flops_exponent: float
    bytes_per_token: float  # keys and values after the longest generation, by the tokens then read
    cross_bytes: int  # keys and values of the image, beside those
    is_rounded: bool
    same_ids: int  # of the longest generation, before the first that differs


@dataclass(frozen=True)
class Study:
    """All designs of one model."""

    model: str
    parameters: int
    prompt_tokens: int
    vision_ms: float  # pixels to image embeddings
    sizes: Sizes
    rows: list[Row]

    @property
    def failures(self) -> list[str]:
        """Designs that promise the ids of their reference and chose others; true for float32 only."""
        wrong = [row for row in self.rows if not row.is_rounded and row.same_ids < max(self.sizes.lengths)]
        return [f"{self.model}: {row.design} differs from {UNCACHED} after {row.same_ids} tokens" for row in wrong]


def timeline(
    start: Start, ids: Tensor, images: Tensor, n: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[list[int], list[float], Run]:
    """The n ids that follow a prompt greedily, the seconds of the clock after which each was chosen, and the run."""
    synchronize(ids.device)
    started = clock()
    chosen = []
    times = []
    run = start(ids, images)
    for i in range(n):
        new = run.logits.argmax(-1)
        chosen.append(int(new[0]))
        times.append(clock() - started)
        if i < n - 1:
            run.logits = run.step(new)
    return chosen, times, run


def exponent(lengths: Sequence[int], after_first: Sequence[float]) -> float:
    """Exponent e of the curve a * (n - 1)^e through the last two costs; n - 1 tokens come after the first."""
    m, n = lengths[-2:]
    low, high = after_first[-2:]
    return round(math.log(high / low) / math.log((n - 1) / (m - 1)), 2)


@torch.inference_mode()
def measure_designs(
    model: VisionLanguageModel | EncoderDecoder, ids: Tensor, images: Tensor, sizes: Sizes, *, export: bool = True
) -> Study:
    """Generate the longest length with all designs: the product's, of ids (1, T) with image tokens, or the twin's."""
    lengths = sizes.lengths
    longest = max(sizes.lengths)
    capacity = ids.size(1) + longest
    progress("exporting graphs" if export else "making designs")
    if isinstance(model, EncoderDecoder):
        name = "encoder-decoder of the same size"
        encode = partial(model.encode, images)
        designs = encoder_decoder_designs(model)
    else:
        name = "language model on image and text"
        encode = partial(model.encode_images, images)
        designs = language_model_designs(model, capacity, sizes.window, export)
    times: dict[str, list[list[float]]] = {design.name: [] for design in designs}  # ms up to each token, by round
    last: dict[str, tuple[list[int], Run]] = {}  # ids and state of the newest round

    def generate(design: Design) -> float:
        chosen, seconds, run = timeline(design.start, ids, images, longest)
        times[design.name].append([1000 * s for s in seconds])
        last[design.name] = chosen, run
        progress(f"{name}, round {len(times[design.name])}/{sizes.rounds}: {design.name}, {seconds[-1]:.3f} s")
        return seconds[-1]

    def count(design: Design) -> list[float]:
        """Operations up to each token; this also warms up."""
        progress(f"{name}: counting the operations of {design.name}")
        with count_flops() as counter:
            return timeline(design.start, ids, images, longest, counter.get_total_flops)[1]

    flops = {design.name: count(design) for design in designs}
    interleave({design.name: partial(generate, design) for design in designs}, sizes.rounds, warmup=0)
    rows = []
    for design in designs:
        chosen, held = last[design.name]
        counted = flops[design.name]
        rounds = times[design.name]
        expected = timeline(design.reference, ids, images, longest)[0] if design.reference else last[UNCACHED][0]
        totals = [[run[n - 1] for run in rounds] for n in lengths]
        row = Row(
            design=design.name,
            total_ms=[round(median(total), 3) for total in totals],
            spread_ms=[round((max(total) - min(total)) / 2, 3) for total in totals],
            token_ms=round(median((run[-1] - run[0]) / (len(run) - 1) for run in rounds), 3),
            exponent=exponent(lengths, [median(run[n - 1] - run[0] for run in rounds) for n in lengths]),
            flops=[int(counted[n - 1]) for n in lengths],
            flops_exponent=exponent(lengths, [counted[n - 1] - counted[0] for n in lengths]),
            bytes_per_token=round(held.bytes_used() / (ids.size(1) + longest - 1), 1),  # the last token is not read
            cross_bytes=storage_bytes(tensor for pair in held.cross for tensor in pair),
            is_rounded=design.is_rounded,
            same_ids=next((i for i, (a, b) in enumerate(zip(chosen, expected)) if a != b), longest),
        )
        rows.append(row)
    vision = partial(measure_seconds, encode, ids.device)
    vision_ms = round(1000 * median(interleave({"": vision}, sizes.rounds)[""]), 3)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Study(name, parameters, ids.size(1), vision_ms, sizes, rows)


def generations_table(study: Study) -> str:
    """Times of generations; below each design its speedup over no cache."""
    title = f"{study.model}: {study.parameters / 1e6:.1f}M parameters, a prompt of {study.prompt_tokens} tokens"
    rows = [["new tokens, ms", *map(str, study.sizes.lengths), "ms/token", "grows as", "FLOPs as"]]
    for row in study.rows:
        cells = [f"{ms:,.1f} ±{half:,.1f}" for ms, half in zip(row.total_ms, row.spread_ms)]
        growth = [f"n^{row.exponent:.2f}", f"n^{row.flops_exponent:.2f}"]
        rows.append([row.design, *cells, f"{row.token_ms:.2f}", *growth])
        if row.design != UNCACHED:
            speedups = [f"{slow / fast:.2f}x" for slow, fast in zip(study.rows[0].total_ms, row.total_ms)]
            rows.append(["  times faster", *speedups, "", "", ""])
    return f"{title}; vision {study.vision_ms:.2f} ms\n{table(rows)}"


def designs_table(study: Study) -> str:
    """Memory, and ids as without a cache."""
    rows = [["designs", "bytes/token", "image KiB", "same ids"]]
    for row in study.rows:
        memory = [f"{row.bytes_per_token:,.0f}", f"{row.cross_bytes / 1024:,.0f}"]
        rows.append([row.design, *memory, f"{row.same_ids} of {max(study.sizes.lengths)}"])
    return table(rows)
