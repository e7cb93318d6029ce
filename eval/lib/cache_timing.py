"""Time of every cache design for the same tokens, token by token; `eval.speedup` is its command."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from eval.lib import flops
from eval.lib.cache_memory import CacheMemory, measure_cache
from eval.lib.cache_variants import UNCACHED, CacheDesign, StudyCase
from eval.lib.command import progress
from eval.lib.timing import interleave, measure_seconds, synchronize


@dataclass(frozen=True)
class Curve:
    """Times of one design, in milliseconds."""

    design: str
    total_ms: list[float]  # median per length
    spread_ms: list[float]  # per length, half of slowest - fastest
    token_ms: float  # per token after the first, over the longest generation
    exponent: float  # growth of the time after the first token, between the last two lengths
    flops: list[int]  # per length, in theory
    flops_exponent: float  # growth of the FLOPs after the first token, likewise
    same_ids: int  # leading tokens of the longest generation that equal those without a cache


@dataclass(frozen=True)
class StudyResult:
    """All designs of one model."""

    model: str
    parameters: int
    prompt_tokens: int
    vision_ms: float  # pixels to image embeddings
    prefill_ms: float  # reading the prompt, image included, with a cache
    lengths: list[int]
    curves: list[Curve]
    memory: list[CacheMemory] = field(default_factory=list)  # at the end of the longest length, per caching design


@torch.inference_mode()
def timeline(design: CacheDesign, n: int, device: torch.device) -> tuple[Tensor, list[float]]:
    """The n ids that a design yields, (n,), and the milliseconds after which each was there."""
    synchronize(device)
    started, ids, times = time.perf_counter(), [], []
    for column in design.stream(n):
        synchronize(device)
        times.append(1000 * (time.perf_counter() - started))
        ids.append(column[0])
    return torch.stack(ids).cpu(), times


@torch.inference_mode()
def stage_ms(stage: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Median milliseconds of a stage, after one call that does not count."""
    timing = interleave({"stage": partial(measure_seconds, stage, device)}, rounds)["stage"]
    return round(1000 * timing.median, 3)


def exponent(lengths: Sequence[int], after_first: Sequence[float]) -> float:
    """The e of a * (n - 1)^e through the last two values, each the cost of n - 1 tokens after the first."""
    (m, n), (low, high) = lengths[-2:], after_first[-2:]
    return round(math.log(high / low) / math.log((n - 1) / (m - 1)), 2)


def make_curve(name: str, case: StudyCase, runs: list[list[float]], lengths: Sequence[int], same_ids: int) -> Curve:
    """A design's curve; runs hold the time of every token of the longest generation, one list per round."""
    read_cost = next(design.read_cost for design in case.designs if design.name == name) or case.read_cost
    costs = {n: flops.generation(read_cost, case.prompt_tokens, n, cached=name != UNCACHED) for n in (1, *lengths)}
    totals = [[run[n - 1] for run in runs] for n in lengths]
    return Curve(
        design=name,
        total_ms=[round(median(times), 3) for times in totals],
        spread_ms=[round((max(times) - min(times)) / 2, 3) for times in totals],
        token_ms=round(median((run[-1] - run[0]) / (len(run) - 1) for run in runs), 3),
        exponent=exponent(lengths, [median(run[n - 1] - run[0] for run in runs) for n in lengths]),
        flops=[costs[n] for n in lengths],
        flops_exponent=exponent(lengths, [costs[n] - costs[1] for n in lengths]),
        same_ids=same_ids,
    )


def time_designs(
    case: StudyCase, lengths: Sequence[int], rounds: int, device: torch.device, log: Callable[[str], None] = progress
) -> StudyResult:
    """Generate the longest length with every design, in interleaved rounds."""
    longest = max(lengths)
    ids: dict[str, Tensor] = {}
    runs: dict[str, list[list[float]]] = {design.name: [] for design in case.designs}
    for design in case.designs:
        timeline(design, 3, device)  # warm up

    def run(design: CacheDesign) -> float:
        ids[design.name], times = timeline(design, longest, device)
        runs[design.name].append(times)
        return times[-1] / 1000

    contestants = {design.name: partial(run, design) for design in case.designs}
    interleave(contestants, rounds, warmup=0, log=lambda line: log(f"{case.name}, {longest} tokens, {line}"))
    tokens = case.prompt_tokens + longest - 1  # the last token is chosen, not read
    memory = [
        measure_cache(design.name, design.held.tensors, tokens, case.kv_bytes(tokens), design.held.cross)
        for design in case.designs
        if design.held
    ]
    same = {name: int((ids[name] == ids[UNCACHED]).long().cumprod(0).sum()) for name in ids}
    return StudyResult(
        model=case.name,
        parameters=sum(parameter.numel() for parameter in case.model.parameters()),
        prompt_tokens=case.prompt_tokens,
        vision_ms=stage_ms(case.vision, rounds, device),
        prefill_ms=stage_ms(case.prefill, rounds, device),
        lengths=list(lengths),
        curves=[make_curve(name, case, runs[name], lengths, same[name]) for name in runs],
        memory=memory,
    )
