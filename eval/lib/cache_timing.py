"""How long every design of a cache takes for the same words, token by token; `eval.speedup` is the door to it."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from eval.lib import flops
from eval.lib.cache_variants import UNCACHED, CacheDesign, Subject
from eval.lib.command import progress
from eval.lib.timing import synchronize


@dataclass(frozen=True)
class Curve:
    """What one design took; milliseconds."""

    design: str
    total_ms: list[float]  # per length, medians
    spread_ms: list[float]  # per length, half of slowest - fastest
    token_ms: float  # per token after the first, over the longest generation
    exponent: float  # of the time after the first token, over the last two lengths
    flops: list[int]  # per length, by theory
    flops_exponent: float  # of those after the first token, over the same
    same_ids: int  # how many of the longest generation are those of the design without a cache, up to the first other


@dataclass(frozen=True)
class StudyResult:
    """One model, every design."""

    model: str
    parameters: int
    prompt_tokens: int
    vision_ms: float  # pixels to what the words' model looks at
    prefill_ms: float  # reading the prompt, image included, with the cache
    lengths: list[int]
    curves: list[Curve]


@torch.inference_mode()
def timeline(design: CacheDesign, n: int, device: torch.device) -> tuple[Tensor, list[float]]:
    """The n ids that a design says, (n,), and the ms after which each was there."""
    synchronize(device)
    started, ids, times = time.perf_counter(), [], []
    for column in design.stream(n):
        synchronize(device)
        times.append(1000 * (time.perf_counter() - started))
        ids.append(column[0])
    return torch.stack(ids).cpu(), times


@torch.inference_mode()
def stage(work: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Median ms of work, which was done once before."""
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - started))
    return round(median(times[1:]), 3)


def exponent(lengths: Sequence[int], after_first: Sequence[float]) -> float:
    """e of the a * (n - 1)^e that goes through the last two values: of what n - 1 tokens took after the first."""
    (m, n), (low, high) = lengths[-2:], after_first[-2:]
    return round(math.log(high / low) / math.log((n - 1) / (m - 1)), 2)


def time_designs(
    subject: Subject, lengths: Sequence[int], rounds: int, device: torch.device, log: Callable[[str], None] = progress
) -> StudyResult:
    """Every design of subject, in rounds in which all take turns."""
    most, said, runs = max(lengths), {}, {design.name: [] for design in subject.designs}
    for design in subject.designs:
        timeline(design, 3, device)  # the first call of anything is slow
    for turn in range(1, rounds + 1):
        for design in subject.designs:
            ids, times = timeline(design, most, device)
            said.setdefault(design.name, ids)
            runs[design.name].append(times)
            log(f"{subject.name}, round {turn}/{rounds}: {design.name}, {most} tokens in {times[-1] / 1000:.2f} s")
    curves = []
    for name, times in runs.items():
        T, same = subject.prompt_tokens, (said[name] == said[UNCACHED]).long().cumprod(0).sum()
        cost = {n: flops.generation(subject.read, T, n, cached=name != UNCACHED) for n in (1, *lengths)}
        at = [[run[n - 1] for run in times] for n in lengths]
        curves.append(
            Curve(
                design=name,
                total_ms=[round(median(totals), 3) for totals in at],
                spread_ms=[round((max(totals) - min(totals)) / 2, 3) for totals in at],
                token_ms=round(median((run[-1] - run[0]) / (most - 1) for run in times), 3),
                exponent=exponent(lengths, [median(run[n - 1] - run[0] for run in times) for n in lengths]),
                flops=[cost[n] for n in lengths],
                flops_exponent=exponent(lengths, [cost[n] - cost[1] for n in lengths]),
                same_ids=int(same),
            )
        )
    return StudyResult(
        model=subject.name,
        parameters=sum(parameter.numel() for parameter in subject.model.parameters()),
        prompt_tokens=subject.prompt_tokens,
        vision_ms=stage(subject.vision, rounds, device),
        prefill_ms=stage(subject.prefill, rounds, device),
        lengths=list(lengths),
        curves=curves,
    )
