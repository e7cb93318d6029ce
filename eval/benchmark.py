"""One generation step of minGPT with and without a KV cache, at growing contexts.

    python -m eval.benchmark

The table is that of the KV-cache homework at github.com/dataflowr/llm_efficiency, in its form and with its vocabulary
of 128 tokens; --vocabulary 50257 is GPT-2's. Without a cache, GPT reads all T tokens. With one, GPT_kv reads the last
token behind a cache of T - 1. Both read the same ids with the same random weights in float32 and choose the token with
the highest logit; that their logits agree is checked before timing.

Figures are medians of interleaved rounds. Every timed step with a cache starts from the same T - 1 tokens, which an
untimed step has just cached, so that the cache has room for one more token: growing it by an eighth, which
copies its tokens, is not timed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from eval.lib import command
from eval.lib.command import interleave, measure_seconds, positive, progress
from models.common import files
from models.mingpt import GPT, SIZES, GPT_kv, GPTConfig
from nanovlm.cli.main import Parser
from nanovlm.console import print_error, table
from nanovlm.device import choose_device
from nanovlm.errors import NanoVLMError, exit_code
from nanovlm.options import DEVICES

VOCAB_SIZE = 128  # the homework's
BLOCK_SIZE = 2048
CONTEXTS = (64, 128, 256, 512, 1024, 1536)
HEADER = f"{'Context T':>10}{'no KV (ms)':>14}{'KV (ms)':>14}{'speedup':>11}"
LINE = "-" * 50
ATTRIBUTED_SIZE = "gpt-mini"  # a few seconds
ATTRIBUTED_CONTEXTS = (128, 512, 1536)
STEPS = ("explicit", "fused", "last position", "cached")  # ways to choose one token
GPT2_VOCAB_SIZE = 50257  # with the homework's, the output head costs next to nothing


class MismatchError(NanoVLMError):
    """The steps with and without a cache computed different logits."""


def make_models(size: str, device: torch.device, vocab_size: int = VOCAB_SIZE) -> tuple[GPT, GPT_kv]:
    """GPT and GPT_kv of a size with shared weights, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gpt = GPT(GPTConfig(size, vocab_size=vocab_size, block_size=BLOCK_SIZE)).to(device).eval()
    with torch.device("meta"):
        gpt_kv = GPT_kv(gpt.config).eval()
    gpt_kv.load_state_dict(gpt.state_dict(), assign=True)
    return gpt, gpt_kv


@torch.inference_mode()
def time_steps(gpt: GPT, gpt_kv: GPT_kv, idx: Tensor, rounds: int, names: Sequence[str] = STEPS) -> list[float]:
    """Median ms of the named ways to choose the token after idx (1, T), interleaved. MismatchError if logits differ.

    Against GPT, the cached step of GPT_kv differs in three things, which are switched one at a time, in this order:
    fused attention in place of the explicit one, the output head at the last position in place of all, and the cache.
    """
    _, prefix = gpt_kv.hidden_states(idx[:, :-2])
    _, cache = gpt_kv.hidden_states(idx[:, :-1], prefix)
    steps: dict[str, Callable[[], Tensor]] = {
        "explicit": lambda: gpt(idx)[0][:, -1],
        "fused": lambda: gpt_kv.lm_head(gpt_kv.hidden_states(idx)[0])[:, -1],
        "last position": lambda: gpt_kv.lm_head(gpt_kv.hidden_states(idx)[0][:, -1]),
        "cached": lambda: gpt_kv.lm_head(gpt_kv.hidden_states(idx, cache)[0][:, -1]),
    }
    logits = {name: steps[name]() for name in names}
    for name in names:
        if not torch.allclose(logits[name], logits["explicit"], rtol=1e-3, atol=1e-4):
            raise MismatchError(f"the {name} step's logits after {idx.size(1)} tokens differ from minGPT's")

    def time_step(name: str) -> float:
        nonlocal cache
        if name == "cached":  # with room for one more token
            _, cache = gpt_kv.hidden_states(idx[:, :-1], prefix)
        return measure_seconds(lambda: steps[name]().argmax(-1), idx.device)

    timings = interleave({name: partial(time_step, name) for name in names}, rounds, warmup=0)  # the check warms up
    return [round(1000 * median(timings[name]), 4) for name in names]


def random_ids(vocab_size: int, contexts: Sequence[int], device: torch.device) -> Tensor:
    return torch.randint(vocab_size, (1, max(contexts)), generator=torch.Generator().manual_seed(1)).to(device)


def benchmark(
    sizes: Sequence[str], contexts: Sequence[int], device: torch.device, rounds: int = 15, vocab_size: int = VOCAB_SIZE
) -> Iterator[str]:
    """Yield the lines of benchmark_results.txt, each once it is known: the header before the first step is timed."""
    progress(command.environment(device))
    yield f"device: {device.type}"
    for size in sizes:
        gpt, gpt_kv = make_models(size, device, vocab_size)
        n_parameters = sum(parameter.numel() for parameter in gpt.parameters())
        yield from ("", f"{size}  ({n_parameters / 1e6:.1f}M params)", HEADER, LINE)
        ids = random_ids(vocab_size, contexts, device)
        for T in contexts:
            uncached_ms, cached_ms = time_steps(gpt, gpt_kv, ids[:, :T], rounds, ("explicit", "cached"))
            yield f"{T:>10}{uncached_ms:>14.2f}{cached_ms:>14.2f}{uncached_ms / cached_ms:>10.2f}x"


def attribute(
    device: torch.device, contexts: Sequence[int] = ATTRIBUTED_CONTEXTS, size: str = ATTRIBUTED_SIZE,
    rounds: int = 5, vocab: int = GPT2_VOCAB_SIZE,
) -> list[dict[str, float]]:  # fmt: skip
    """Milliseconds of each of STEPS at each context, of a size of minGPT with random weights."""
    gpt, gpt_kv = make_models(size, device, vocab)
    ids = random_ids(vocab, contexts, device)
    names = [f"{name.replace(' ', '_')}_ms" for name in STEPS]
    rows = []
    for T in contexts:
        progress(f"the causes of {size}'s speedup, {T} tokens")
        rows.append({"context": T} | dict(zip(names, time_steps(gpt, gpt_kv, ids[:, :T], rounds))))
    return rows


def attribution_table(rows: Sequence[dict[str, float]]) -> str:
    """The factors of the kernel, the last position and the cache, and their product, beside the times of both ends."""
    title = f"{ATTRIBUTED_SIZE}'s step, vocabulary of {GPT2_VOCAB_SIZE:,}: "
    title += "fused attention, the head at the last token, the cache"
    cells = [["context", "no cache, ms", "cache, ms", "kernel", "last position", "cache alone", "product"]]
    for row in rows:
        context, *times = row.values()
        factors = [*(before / after for before, after in pairwise(times)), times[0] / times[-1]]
        ends = [f"{ms:,.2f}" for ms in (times[0], times[-1])]
        cells.append([str(context), *ends, *(f"{factor:.2f}x" for factor in factors)])
    return f"{title}\n{table(cells)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="eval.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    sizes = ["gpt-mini", "gpt2"]
    out = Path("benchmark_results.txt")
    contexts = " ".join(map(str, CONTEXTS))
    add("--out", type=Path, default=out, metavar="FILE", help=f"(default: {out})")
    add("--device", default="auto", choices=DEVICES, help="(default: auto)")
    add("--sizes", nargs="+", default=sizes, choices=tuple(SIZES), help=f"(default: {' '.join(sizes)})")
    add("--contexts", nargs="+", type=int, default=CONTEXTS, metavar="T", help=f"(default: {contexts})")
    add("--rounds", type=positive, default=15, metavar="N", help="timings of each step (default: 15)")
    add("--vocabulary", type=positive, default=VOCAB_SIZE, metavar="N", help=f"tokens (default: {VOCAB_SIZE})")
    command.add_threads_flag(parser)
    args = parser.parse_args(argv)
    if not all(3 <= T <= BLOCK_SIZE for T in args.contexts):
        parser.error(f"--contexts {' '.join(map(str, args.contexts))}: each must be from 3 to {BLOCK_SIZE}")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    try:
        lines = []
        for line in benchmark(args.sizes, args.contexts, choose_device(args.device), args.rounds, args.vocabulary):
            print(line, flush=True)
            lines.append(f"{line}\n")
        files.replace(args.out, "".join(lines))
    except (NanoVLMError, OSError) as error:
        print_error(f"{parser.prog}: {error}")
        return exit_code(error) if isinstance(error, NanoVLMError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
