"""Memory, time and abilities of every cache design of a model, for the same tokens; `eval.speedup` is its command.

A generation runs from the pixels to its last token, in one run for all lengths; its end token is ignored. Prefill is
timed against the prompt's length and decode against the batch, both on random text. All designs run in interleaved
rounds. The ids that a design chooses are compared with those without a cache; for the sliding window, with those under
the same window mask without a cache.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from eval.lib.cache_designs import UNCACHED, Design, Images, Run, Start, encoder_decoder_designs, language_model_designs
from eval.lib.command import progress, table
from eval.lib.hardware import count_flops
from eval.lib.timing import interleave, measure_seconds, synchronize
from models.cache import storage_bytes
from models.kv_study.encoder_decoder import EncoderDecoder
from models.vision_language_model import VisionLanguageModel

TIMED_STEPS = 8  # behind the longest prompt, in a batch


@dataclass(frozen=True)
class Sizes:
    """What is measured: generations of these lengths, prompts of these lengths, batches of these sizes."""

    lengths: Sequence[int]
    prompts: Sequence[int] = (64, 256)
    batches: Sequence[int] = (1, 4)
    window: int = 64
    rounds: int = 5

    def capacity(self, prompt: int) -> int:
        """Tokens of the longest sequence; prompt is the length of the prompt with an image."""
        return max(prompt + max(self.lengths), max(self.prompts, default=0) + TIMED_STEPS)


@dataclass(frozen=True)
class Case:
    """A model with a prompt, ids (1, T), about an image, and its designs."""

    name: str
    model: VisionLanguageModel | EncoderDecoder
    ids: Tensor
    images: Tensor
    vision: Callable[[], object]
    designs: list[Design]
    random_images: Images = None  # (1, 3, S, S) for prompts of random text, if the model can not do without


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
    prefill_ms: list[float] = field(default_factory=list)  # per prompt length
    step_ms: list[float] = field(default_factory=list)  # per batch size: one step of the whole batch


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
        longest = max(self.sizes.lengths)
        return [
            f"{self.model}: {row.design.strip()} differs from {UNCACHED} after {row.same_ids} tokens"
            for row in self.rows
            if not row.is_rounded and row.same_ids < longest
        ]


def make_case(
    model: VisionLanguageModel | EncoderDecoder, ids: Tensor, images: Tensor, sizes: Sizes, *, export: bool = True
) -> Case:
    """The product's model on a prompt, ids (1, T) with image tokens, or the encoder-decoder on one about one image."""
    capacity = sizes.capacity(ids.size(1))
    if isinstance(model, EncoderDecoder):
        name, designs = "encoder-decoder of the same size", encoder_decoder_designs(model, capacity, export)
        return Case(name, model, ids, images, partial(model.encode, images), designs, images)
    name, designs = "language model on image and text", language_model_designs(model, capacity, sizes.window, export)
    return Case(name, model, ids, images, partial(model.encode_images, images), designs)


def timeline(
    start: Start, ids: Tensor, images: Images, n: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[list[int], list[float], Run]:
    """The n ids that follow a prompt greedily, the seconds of the clock after which each was chosen, and the run."""
    synchronize(ids.device)
    started, chosen, times = clock(), [], []
    run = start(ids, images)
    for i in range(n):
        new = run.logits.argmax(-1)
        chosen.append(int(new[0]))
        times.append(clock() - started)
        if i < n - 1:
            run.logits = run.step(new)
    return chosen, times, run


def exponent(lengths: Sequence[int], after_first: Sequence[float]) -> float:
    """The e of a * (n - 1)^e through the last two values, each the cost of n - 1 tokens after the first."""
    (m, n), (low, high) = lengths[-2:], after_first[-2:]
    return round(math.log(high / low) / math.log((n - 1) / (m - 1)), 2)


def make_row(
    design: Design, case: Case, times: list[list[float]], flops: Sequence[float], sizes: Sizes, held: Run, same_ids: int
) -> Row:
    """A design's results so far.

    times hold the milliseconds after which each token of the longest generation was there, a list per round; flops the
    operations up to each of these tokens.
    """
    lengths, prompt = sizes.lengths, case.ids.size(1)
    totals = [[run[n - 1] for run in times] for n in lengths]
    return Row(
        design=design.name,
        total_ms=[round(median(total), 3) for total in totals],
        spread_ms=[round((max(total) - min(total)) / 2, 3) for total in totals],
        token_ms=round(median((run[-1] - run[0]) / (len(run) - 1) for run in times), 3),
        exponent=exponent(lengths, [median(run[n - 1] - run[0] for run in times) for n in lengths]),
        flops=[int(flops[n - 1]) for n in lengths],
        flops_exponent=exponent(lengths, [flops[n - 1] - flops[0] for n in lengths]),
        bytes_per_token=round(held.bytes_used() / (prompt + max(lengths) - 1), 1),  # the last token is not read
        cross_bytes=storage_bytes(tensor for pair in held.cross for tensor in pair),
        is_rounded=design.is_rounded,
        same_ids=same_ids,
    )


def time_generations(case: Case, sizes: Sizes) -> list[Row]:
    """Generate the longest length with every design."""
    longest, inputs = max(sizes.lengths), (case.ids, case.images)
    times: dict[str, list[list[float]]] = {design.name: [] for design in case.designs}
    last: dict[str, tuple[list[int], Run]] = {}  # ids and state of the newest round

    def generate(design: Design) -> float:
        chosen, seconds, run = timeline(design.start, *inputs, longest)
        times[design.name].append([1000 * s for s in seconds])
        last[design.name] = chosen, run
        return seconds[-1]

    def count(design: Design) -> list[float]:
        """Operations up to each token; this also warms up."""
        with count_flops() as counter:
            return timeline(design.start, *inputs, longest, counter.get_total_flops)[1]

    flops = {design.name: count(design) for design in case.designs}
    contestants = {design.name: partial(generate, design) for design in case.designs}
    log = lambda line: progress(f"{case.name}, {longest} tokens, {line}")  # noqa: E731
    interleave(contestants, sizes.rounds, warmup=0, log=log)
    rows = []
    for design in case.designs:
        chosen, run = last[design.name]
        expected = timeline(design.reference, *inputs, longest)[0] if design.reference else last[UNCACHED][0]
        same = next((i for i, (a, b) in enumerate(zip(chosen, expected)) if a != b), longest)
        rows.append(make_row(design, case, times[design.name], flops[design.name], sizes, run, same))
    return rows


def time_axes(case: Case, rows: Sequence[Row], sizes: Sizes) -> None:
    """Add to rows the times of a prefill by prompt length and of a decode step by batch size, on random text."""
    special, device = getattr(case.model, "image_token_id", -1), case.ids.device
    shape, generator = (max(sizes.batches), max(sizes.prompts)), torch.Generator().manual_seed(0)
    text = torch.randint(min(1000, case.model.cfg.lm_vocab_size - 1), shape, generator=generator)
    text = (text + (text == special)).to(device)  # no image is given with random text

    def inputs(batch: int, length: int) -> tuple[Tensor, Images]:
        images = case.random_images
        return text[:batch, :length], images if images is None else images.expand(batch, *images.shape[1:])

    def steps(design: Design, batch: int) -> float:
        run = design.start(*inputs(batch, max(sizes.prompts)))
        new = run.logits.argmax(-1)
        return measure_seconds(lambda: [run.step(new) for _ in range(TIMED_STEPS)], device) / TIMED_STEPS

    def prefill(design: Design, length: int) -> float:
        return measure_seconds(lambda: design.start(*inputs(1, length)), device)

    for axis, measure, values in (("prefill_ms", prefill, sizes.prompts), ("step_ms", steps, sizes.batches)):
        for size in values:
            progress(f"{case.name}: {axis.partition('_')[0]}, {size}")
            timings = interleave({d.name: partial(measure, d, size) for d in case.designs}, sizes.rounds)
            for row in rows:
                getattr(row, axis).append(round(1000 * median(timings[row.design]), 3))


@torch.inference_mode()
def measure_case(case: Case, sizes: Sizes) -> Study:
    """Measure all designs of a model."""
    rows = time_generations(case, sizes)
    if sizes.prompts:
        time_axes(case, rows, sizes)
    seconds = interleave({"": partial(measure_seconds, case.vision, case.ids.device)}, sizes.rounds)[""]
    parameters = sum(parameter.numel() for parameter in case.model.parameters())
    return Study(case.name, parameters, case.ids.size(1), round(1000 * median(seconds), 3), sizes, rows)


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
    """Memory, times by prompt and batch, and ids as without a cache."""
    prompts, batches = study.sizes.prompts, study.sizes.batches
    header = ["designs", "bytes/token", "image KiB", *(f"prefill {n}, ms" for n in prompts)]
    header += [*(f"step of {n}, ms" for n in batches), "same ids"]
    rows = [header]
    for row in study.rows:
        times = [f"{ms:.2f}" for ms in (*row.prefill_ms, *row.step_ms)]
        same = f"{row.same_ids} of {max(study.sizes.lengths)}"
        rows.append([row.design, f"{row.bytes_per_token:,.0f}", f"{row.cross_bytes / 1024:,.0f}", *times, same])
    return table(rows)
