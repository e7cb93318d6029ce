"""Every cache design in one table: memory, time and abilities; prefill against length, decode against batch.

Prompts are random text. All designs run in interleaved rounds. The ids that a design chooses are compared with those
without a cache; for the sliding window, with those under the same window mask without a cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eval.lib.command import progress
from eval.lib.timing import interleave, measure_seconds
from models.kv_study import sliding_window
from models.kv_study.block_cache import BlockCache, block_caches, prefill_state
from models.kv_study.encoder_decoder import EncoderDecoder
from models.kv_study.hook_cache import HookCache, install_kv_cache_hooks
from models.kv_study.int8_cache import Int8KV
from models.kv_study.paged_cache import BlockPool, PagedKV
from models.kv_study.sliding_window import SlidingWindowKV
from models.kv_study.static_cache import LanguageModelStep, TextDecoderStep, language_model_cache, text_decoder_cache
from models.vision_language_model import VisionLanguageModel

PROMPTS, BATCHES, NEW_TOKENS, WINDOW = (64, 256), (1, 4), 24, 64
TIMED_STEPS = 8  # of the answer, behind the longest prompt
BLOCK_SIZE = 16  # tokens of a paged block, as in vLLM


@dataclass
class Run:
    """A generation in progress: the next logits (B, V), how to append ids (B,), and the bytes of cached tokens."""

    logits: Tensor
    step: Callable[[Tensor], Tensor]
    bytes_used: Callable[[], int]


@dataclass(frozen=True)
class Design:
    """One row of the table; start(ids (B, T)) prefills."""

    name: str
    start: Callable[[Tensor], Run]
    fork: str  # how several continuations of one prefill come about
    export: bool  # whether torch.export makes graphs of it, in models/kv_study/static_cache.py
    chunk: bool  # whether a prompt can be read in parts
    exact: str = "yes"
    reference: Callable[[Tensor], Run] | None = None  # whose ids are expected; by default the first design's


@dataclass(frozen=True)
class Row:
    """Results of one design."""

    design: str
    bytes_per_token: float  # of one sequence, after the longest prompt and its answer
    prefill_ms: list[float]  # one per prompt length
    token_ms: list[float]  # one step of the whole batch, one per batch size, after the longest prompt
    fork: str
    export: bool
    chunk: bool
    exact: str
    same_ids: int  # of the answer, before the first that differs
    new_tokens: int


def uncached(next_logits: Callable[[Tensor], Tensor], ids: Tensor) -> Run:
    """Recompute all tokens for each new one."""

    def step(new: Tensor) -> Tensor:
        nonlocal ids
        ids = torch.cat([ids, new[:, None]], 1)
        return next_logits(ids)

    return Run(next_logits(ids), step, lambda: 0)


def language_model_designs(model: VisionLanguageModel, capacity: int, window: int) -> list[Design]:
    """The designs of the product's language model, for sequences of up to capacity tokens."""
    decoder = model.decoder
    n_blocks = len(decoder.blocks)

    def caches(make: Callable[[int], list[BlockCache]], reorder: bool, ids: Tensor) -> Run:
        """Prefill and decode by the product's code on other caches; reorder rows at each step, as beam search does."""
        prefix = prefill_state(empty) if (empty := make(len(ids))) else None
        logits, state = model.prefill(ids[:1] if reorder else ids, None, None, prefix)
        order = torch.arange(len(ids), device=ids.device).flip(0)
        if reorder:
            logits, state = logits.expand(len(ids), -1), state.rows(order * 0)

        def step(new: Tensor) -> Tensor:
            nonlocal state
            logits, state = model.decode(new, state.rows(order) if reorder else state)
            return logits

        return Run(logits, step, lambda: sum(kv.bytes_used for kv in state.kv_cache))

    def windowed(ids: Tensor) -> Run:
        kv = [SlidingWindowKV(window) for _ in range(n_blocks)]
        hidden = sliding_window.forward(decoder, model.embed_tokens(ids), window, 0, kv)

        def step(new: Tensor) -> Tensor:
            hidden, _ = decoder(model.embed_tokens(new[:, None]), None, block_caches(kv), kv[0].length)
            return decoder.head(hidden[:, -1])

        return Run(decoder.head(hidden[:, -1]), step, lambda: sum(cache.bytes_used for cache in kv))

    def window_mask(ids: Tensor) -> Tensor:
        return decoder.head(sliding_window.forward(decoder, model.embed_tokens(ids), window)[:, -1])

    def static(ids: Tensor) -> Run:
        kv, program = language_model_cache(decoder, len(ids), capacity), LanguageModelStep(decoder)
        mask = ids.new_ones(len(ids), capacity)
        return static_run(lambda x, start: program(x, mask, start, kv), ids, capacity, kv)

    def paged(batch: int) -> list[BlockCache]:
        blocks = batch * -(-capacity // BLOCK_SIZE)
        return [PagedKV(BlockPool(blocks, BLOCK_SIZE)) for _ in range(n_blocks)]

    def plain(ids: Tensor) -> Tensor:
        return model.prefill(ids)[0]

    return [
        Design("no cache", partial(uncached, plain), fork="yes", export=False, chunk=False),
        Design("per-block cache", partial(caches, lambda batch: [], False), fork="yes", export=False, chunk=True),
        Design("  with beam search", partial(caches, lambda batch: [], True), fork="yes", export=False, chunk=True),
        Design("static cache", static, fork="no", export=True, chunk=True),
        Design("paged blocks", partial(caches, paged, False), fork="shared", export=False, chunk=True),
        Design(
            "int8 cache",
            partial(caches, lambda batch: [Int8KV() for _ in range(n_blocks)], False),
            fork="yes",
            export=False,
            chunk=True,
            exact="rounded",
        ),
        Design(
            f"sliding window, {window}",
            windowed,
            fork="copy",
            export=False,
            chunk=True,
            exact="as mask",
            reference=partial(uncached, window_mask),
        ),
    ]


def encoder_decoder_designs(model: EncoderDecoder, images: Tensor, capacity: int) -> list[Design]:
    """The designs of the encoder-decoder, about one image (1, 3, S, S), which is encoded before."""
    decoder, xa = model.decoder, model.encode(images)

    def hooks(ids: Tensor) -> Run:
        past = HookCache()

        def step(ids: Tensor) -> Tensor:
            nonlocal past
            with install_kv_cache_hooks(decoder, past) as past:
                return decoder(ids, xa)[:, -1]

        tensors = lambda: [*past.self_kv.values(), *past.cross_kv.values()]  # noqa: E731
        return Run(step(ids), lambda new: step(new[:, None]), lambda: sum(tensor.nbytes for tensor in tensors()))

    def cross_once(ids: Tensor) -> Run:
        logits, state = model.prefill(ids, images)

        def step(new: Tensor) -> Tensor:
            nonlocal state
            logits, state = model.decode(new, state)
            return logits

        def bytes_used() -> int:
            cross = sum(key.nbytes + value.nbytes for key, value in state.cross_kv)
            return cross + sum(kv.bytes_used for kv in state.self_kv or [])

        return Run(logits, step, bytes_used)

    def static(ids: Tensor) -> Run:
        kv, cross = text_decoder_cache(decoder, len(ids), capacity), decoder.project_cross_kv(xa)
        program = TextDecoderStep(decoder)
        return static_run(lambda x, start: program(x, start, cross, kv), ids, capacity, kv, cross)

    return [
        Design("no cache", partial(uncached, lambda ids: decoder(ids, xa)[:, -1]), "yes", False, False),
        Design("hooks", hooks, fork="yes", export=False, chunk=True),
        Design("cross-attention once", cross_once, fork="yes", export=False, chunk=True),
        Design("static cache", static, fork="no", export=True, chunk=True),
    ]


def static_run(
    program: Callable[[Tensor, Tensor], Tensor], ids: Tensor, capacity: int, kv: list, cross: Sequence = ()
) -> Run:
    """Prefill and decode by a program on a cache of fixed capacity, all of which counts as used."""
    length = ids.size(1)

    def step(new: Tensor) -> Tensor:
        nonlocal length
        logits, length = program(new[:, None], torch.tensor(length, device=ids.device)), length + 1
        return logits

    size = sum(tensor.nbytes for pair in (*kv, *cross) for tensor in pair)
    return Run(program(ids, torch.tensor(0, device=ids.device)), step, lambda: size)


@torch.inference_mode()
def greedy(start: Callable[[Tensor], Run], ids: Tensor, n: int) -> tuple[list[int], Run]:
    """The n ids that follow the first prompt, and the run after them."""
    run, chosen = start(ids), []
    for _ in range(n):
        new = run.logits.argmax(-1)
        chosen.append(int(new[0]))
        run.logits = run.step(new)
    return chosen, run


@torch.inference_mode()
def measure(
    title: str, designs: Sequence[Design], prompts: Tensor, lengths: Sequence[int], batches: Sequence[int],
    new_tokens: int, rounds: int,
) -> list[Row]:  # fmt: skip
    """One row per design; prompts (max(batches), max(lengths)) are cut to each length and batch size."""
    longest, device = max(lengths), prompts.device
    seconds: dict[tuple[str, str, int], float] = {}
    n_steps = min(new_tokens, TIMED_STEPS)

    def steps(design: Design, ids: Tensor) -> float:
        run = design.start(ids)
        new = run.logits.argmax(-1)
        return measure_seconds(lambda: [run.step(new) for _ in range(n_steps)], device) / n_steps

    for axis, sizes in (("prefill", lengths), ("decode", batches)):
        for size in sizes:
            ids = prompts[:1, :size] if axis == "prefill" else prompts[:size, :longest]
            contestants: dict[str, Callable[[], float]] = {}
            for design in designs:
                stage = partial(design.start, ids)
                contestants[design.name] = (
                    partial(measure_seconds, stage, device) if axis == "prefill" else partial(steps, design, ids)
                )
            for name, timing in interleave(contestants, rounds).items():
                seconds[name, axis, size] = timing.median
            progress(f"{title}: {axis}, {size}")
    rows = []
    for design in designs:
        chosen, run = greedy(design.start, prompts[:1, :longest], new_tokens)
        expected, _ = greedy(design.reference or designs[0].start, prompts[:1, :longest], new_tokens)
        same = next((i for i, (a, b) in enumerate(zip(chosen, expected)) if a != b), new_tokens)
        rows.append(
            Row(
                design.name,
                round(run.bytes_used() / (longest + new_tokens), 1),
                [round(1000 * seconds[design.name, "prefill", size], 3) for size in lengths],
                [round(1000 * seconds[design.name, "decode", size], 3) for size in batches],
                design.fork,
                design.export,
                design.chunk,
                design.exact,
                same,
                new_tokens,
            )
        )
    return rows


@dataclass(frozen=True)
class CacheTable:
    """Rows of both models."""

    prompts: list[int]
    batches: list[int]
    models: dict[str, list[Row]]

    @property
    def failures(self) -> list[str]:
        """Designs that promise the ids of their reference and chose others; true for float32 only."""
        return [
            f"{model}: {row.design.strip()} chose other ids after {row.same_ids} of {row.new_tokens}"
            for model, rows in self.models.items()
            for row in rows
            if row.exact != "rounded" and row.same_ids < row.new_tokens
        ]


def cache_table(
    model: VisionLanguageModel,
    twin: EncoderDecoder,
    images: Tensor,
    prompts: Sequence[int] = PROMPTS,
    batches: Sequence[int] = BATCHES,
    new_tokens: int = NEW_TOKENS,
    window: int = WINDOW,
    rounds: int = 2,
) -> CacheTable:
    """Measure all designs on random text, the encoder-decoder about the first image."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.cfg.lm_vocab_size, (max(batches), max(prompts)), generator=generator)
    if model.image_token_id >= 0:  # its id means an image; another one takes its place
        ids = ids.masked_fill(ids == model.image_token_id, (model.image_token_id + 1) % model.cfg.lm_vocab_size)
    ids, capacity = ids.to(model.device), max(prompts) + new_tokens
    with torch.inference_mode():
        groups = {
            "language model": language_model_designs(model, capacity, window),
            "encoder-decoder": encoder_decoder_designs(twin, images[:1], capacity),
        }
        rows = {
            title: measure(title, designs, ids, prompts, batches, new_tokens, rounds)
            for title, designs in groups.items()
        }
    return CacheTable(list(prompts), list(batches), rows)


def render(table: CacheTable) -> str:
    """The table as text, all designs of a model below each other."""
    lines = []
    for model, rows in table.models.items():
        lines.append(
            f"{model:22}{'bytes':>8}" + "".join(f"{'prefill':>10}" for _ in table.prompts)
            + "".join(f"{'ms/token':>10}" for _ in table.batches)
        )  # fmt: skip
        lines.append(
            f"{'':22}{'/token':>8}" + "".join(f"{n:>7} ms" for n in table.prompts)
            + "".join(f"{f'batch {n}':>10}" for n in table.batches) + "  fork    export  chunk  exact    same ids"
        )  # fmt: skip
        for row in rows:
            times = "".join(f"{ms:>10.2f}" for ms in (*row.prefill_ms, *row.token_ms))
            export, chunk = ("yes" if able else "no" for able in (row.export, row.chunk))
            lines.append(
                f"{row.design:22}{row.bytes_per_token:>8,.0f}{times}  {row.fork:8}{export:8}{chunk:7}{row.exact:9}"
                f"{row.same_ids} of {row.new_tokens}"
            )
        lines.append("")
    return "\n".join(lines).rstrip()
