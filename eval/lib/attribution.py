"""What each part of minGPT's step with a cache contributes to its speedup (eval/benchmark.py times the whole).

Against GPT, the cached step of GPT_kv differs in three things. They are switched one at a time, in this order: fused
attention in place of the explicit one, the output head at the last position in place of all, and the cache. Each
factor is the time before over the time after its switch, so that the three multiply to the whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from eval.benchmark import MismatchError, make_models
from eval.lib.command import progress, table
from eval.lib.timing import interleave, measure_seconds
from models.mingpt import GPT, GPT_kv

SIZE, CONTEXTS = "gpt-mini", (128, 512, 1536)  # a few seconds
VOCABULARY = 50257  # GPT-2's; with the homework's 128, the head costs next to nothing


@dataclass(frozen=True)
class Attribution:
    """Median milliseconds of one step at context T, one more thing switched at a time."""

    context: int
    explicit_ms: float  # GPT: explicit attention, the head at every position, no cache
    fused_ms: float  # fused attention (SDPA)
    last_position_ms: float  # and the head at the last position only
    cached_ms: float  # and a cache of T - 1 tokens

    @property
    def factors(self) -> list[float]:
        """Of the kernel, the last position and the cache, and their product."""
        times = (self.explicit_ms, self.fused_ms, self.last_position_ms, self.cached_ms)
        return [*(before / after for before, after in pairwise(times)), self.explicit_ms / self.cached_ms]


@torch.inference_mode()
def attribute_step(gpt: GPT, gpt_kv: GPT_kv, idx: Tensor, rounds: int) -> Attribution:
    """Time the four steps that choose the token after idx (1, T), interleaved. MismatchError if they disagree."""
    _, prefix = gpt_kv.hidden_states(idx[:, :-2])
    _, cache = gpt_kv.hidden_states(idx[:, :-1], prefix)
    steps: dict[str, Callable[[], Tensor]] = {
        "explicit": lambda: gpt(idx)[0][:, -1],
        "fused": lambda: gpt_kv.lm_head(gpt_kv.hidden_states(idx)[0])[:, -1],
        "last position": lambda: gpt_kv.lm_head(gpt_kv.hidden_states(idx)[0][:, -1]),
        "cached": lambda: gpt_kv.lm_head(gpt_kv.hidden_states(idx, cache)[0][:, -1]),
    }
    expected = steps["explicit"]()
    for name, step in steps.items():
        if not torch.allclose(step(), expected, rtol=1e-3, atol=1e-4):
            raise MismatchError(f"the {name} step's logits after {idx.size(1)} tokens differ from minGPT's")

    def time_step(name: str) -> float:
        nonlocal cache
        if name == "cached":  # with room for one more token, as in eval.benchmark
            _, cache = gpt_kv.hidden_states(idx[:, :-1], prefix)
        return measure_seconds(steps[name], idx.device)

    timings = interleave({name: partial(time_step, name) for name in steps}, rounds, warmup=0)
    return Attribution(idx.size(1), *(round(1000 * median(timings[name]), 4) for name in steps))


def attribute(
    device: torch.device, contexts: Sequence[int] = CONTEXTS, size: str = SIZE, rounds: int = 5, vocab: int = VOCABULARY
) -> list[Attribution]:
    """Attribute the speedup of a size of minGPT, random weights, at each context."""
    gpt, gpt_kv = make_models(size, device, vocab)
    ids = torch.randint(vocab, (1, max(contexts)), generator=torch.Generator().manual_seed(1)).to(device)
    progress(f"attribution: {size}")
    return [attribute_step(gpt, gpt_kv, ids[:, :T], rounds) for T in contexts]


def attribution_table(rows: Sequence[Attribution]) -> str:
    """The factors, whose product is the whole, beside the times of both ends."""
    title = f"{SIZE}'s step, vocabulary of {VOCABULARY:,}: fused attention, the head at the last token, the cache"
    cells = [["context", "no cache, ms", "cache, ms", "kernel", "last position", "cache alone", "product"]]
    for row in rows:
        times = [f"{ms:,.2f}" for ms in (row.explicit_ms, row.cached_ms)]
        cells.append([str(row.context), *times, *(f"{factor:.2f}x" for factor in row.factors)])
    return f"{title}\n{table(cells)}"
