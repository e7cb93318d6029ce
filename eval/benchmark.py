"""One step of generation with and without a key/value cache, for minGPT's twins at growing contexts.

    python -m eval.benchmark

Without: GPT reads all T tokens. With: GPT_kv reads the last one, behind a cache of T - 1. Both see the same ids, share
their weights (random, of GPT-2's vocabulary), compute in float32, on AMD's CPUs by oneDNN (models/inference/cpu_kernels.py), and
choose the likeliest next token; that they choose the same is checked before anything is timed. Sizes are counted as
minGPT does, without lm_head.

Figures are medians of rounds in which both take turns. Every timed step with a cache starts from the same value of
T - 1 tokens, made just before, untimed, by a step that reads token T - 1: as in any generation, there is room behind
that cache. What the room costs is not in these figures: each time a cache has doubled, its tokens are copied once.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from eval.lib.command import progress
from eval.lib.hardware import environment
from eval.lib.timing import synchronize
from models.inference.cpu_kernels import onednn_pays_off, replace_linears
from models.mingpt import GPT, SIZES, GPT_kv, GPTConfig
from nanovlm.cli.main import Parser
from nanovlm.device import choose_device

VOCABULARY, BLOCK_SIZE = 50257, 2048
CONTEXTS = (64, 128, 256, 512, 1024, 1536)
HEADER = f"{'Context T':<12}{'no KV (ms)':>14}{'KV (ms)':>12}{'speedup':>12}"
LINE = "-" * len(HEADER)  # 50


def twins(size: str, device: torch.device, vocab_size: int = VOCABULARY) -> tuple[GPT, GPT_kv]:
    """GPT and GPT_kv of a size, on the same weights, which are the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gpt = GPT(GPTConfig(size, vocab_size=vocab_size, block_size=BLOCK_SIZE)).to(device).eval()
    with torch.device("meta"):
        gpt_kv = GPT_kv(gpt.config).eval()
    gpt_kv.load_state_dict(gpt.state_dict(), assign=True)
    if onednn_pays_off():
        replace_linears(gpt)
        replace_linears(gpt_kv)
    return gpt, gpt_kv


@torch.inference_mode()
def time_step(gpt: GPT, gpt_kv: GPT_kv, idx: Tensor, rounds: int) -> tuple[float, float]:
    """Median ms to choose the token after idx (1, T): reading all T, and reading the last behind a cache of T - 1."""

    def without():
        return gpt(idx)[0][:, -1].argmax(-1)

    def cached():
        return gpt_kv(idx, kv_cache=cache)[0][:, -1].argmax(-1)

    def timed(step: Callable[[], Tensor]) -> float:
        synchronize(idx.device)
        started = time.perf_counter()
        step()
        synchronize(idx.device)
        return 1000 * (time.perf_counter() - started)

    _, _, prefix = gpt_kv(idx[:, :-2])
    _, _, cache = gpt_kv(idx[:, :-1], kv_cache=prefix)
    if without().item() != cached().item():
        raise RuntimeError(f"with and without a cache, the token after {idx.size(1)} differs")
    slow, fast = [], []
    for _ in range(rounds):
        slow.append(timed(without))
        _, _, cache = gpt_kv(idx[:, :-1], kv_cache=prefix)
        fast.append(timed(cached))
    return median(slow), median(fast)


def benchmark(
    sizes: list[str],
    contexts: list[int],
    device: torch.device,
    rounds: int = 15,
    vocab_size: int = VOCABULARY,
    log: Callable[[str], None] = progress,
) -> str:
    """The table, as benchmark_results.txt holds it."""
    log(environment(device))
    lines = [f"device: {device.type}"]
    for size in sizes:
        gpt, gpt_kv = twins(size, device, vocab_size)
        n_parameters = sum(p.numel() for p in gpt.transformer.parameters())
        lines += [f"{size} ({n_parameters / 1e6:.1f}M params)", HEADER, LINE]
        ids = torch.randint(vocab_size, (1, max(contexts)), generator=torch.Generator().manual_seed(1)).to(device)
        for T in contexts:
            slow, fast = time_step(gpt, gpt_kv, ids[:, :T], rounds)
            lines.append(f"{T:<12}{slow:>14.2f}{fast:>12.2f}{slow / fast:>11.2f}x")
            log(f"{size:12}{lines[-1]}")
    return "\n".join(lines) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Write text to path; whoever reads path meanwhile finds all of the old or all of the new."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # temporary files are private, results are not
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="eval.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("benchmark_results.txt"), metavar="FILE", help="(benchmark_results.txt)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="(auto)")
    add(
        "--sizes", nargs="+", default=["gpt-mini", "gpt2"], choices=tuple(SIZES), metavar="SIZE", help="(gpt-mini gpt2)"
    )
    add("--contexts", nargs="+", type=int, default=CONTEXTS, metavar="T", help=f"({' '.join(map(str, CONTEXTS))})")
    add("--rounds", type=int, default=15, metavar="N", help="timings of each side, of which the median counts (15)")
    add("--vocabulary", type=int, default=VOCABULARY, metavar="N", help=f"({VOCABULARY}, GPT-2's)")
    args = parser.parse_args(argv)
    if not all(3 <= T <= BLOCK_SIZE for T in args.contexts):
        parser.error(f"--contexts {' '.join(map(str, args.contexts))}: each must be from 3 to {BLOCK_SIZE}")
    if min(args.rounds, args.vocabulary) < 1:
        parser.error(f"--rounds {args.rounds} and --vocabulary {args.vocabulary} must be 1 or more")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    try:
        device = choose_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    try:
        table = benchmark(args.sizes, args.contexts, device, args.rounds, args.vocabulary)
        write_whole(args.out, table)
    except (OSError, RuntimeError) as error:
        print(f"eval.benchmark: {error}", file=sys.stderr)
        return 1
    print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
