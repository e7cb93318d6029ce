"""minGPT's sorting task, learned by gpt-nano, and the check that a KV cache does not change the output.

    python -m eval.sort_task

The task is Karpathy's: read six digits from 0 to 2, write them sorted. A quarter of the 729 inputs, chosen by a hash of
the input, is held out; a GPT_kv is trained until all of them are sorted. Then `GPT.generate`, with the same weights,
and `GPT_kv.generate_kv` answer all 729 inputs, greedily and sampled, and must agree. At twelve tokens a cache saves
little time, so gpt-mini with random weights also writes 200 tokens with and without it, in interleaved rounds, as the
homework at github.com/dataflowr/llm_efficiency does. At width 48 a second CPU thread gains nothing, so one is used.
"""

import argparse
import hashlib
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median, pstdev
from types import SimpleNamespace

import torch
from torch import Tensor

from eval.lib import command
from eval.lib.command import interleave, measure_seconds, positive, progress
from models.mingpt import GPT, GPT_kv, GPTConfig
from nanovlm.cli.main import Parser

BATCH_SIZE = 64
EVAL_INTERVAL = 100
TRAIN_CONFIG = SimpleNamespace(learning_rate=5e-4, betas=(0.9, 0.95), weight_decay=0.1)  # minGPT's, as its batch size
PROMPT = [0, 0, 2, 1, 0, 1, 2]  # of the long generation, the homework's
N_TOKENS = 200
TEMPERATURE = 3.0  # high enough that a confident model still samples different tokens


@dataclass(frozen=True)
class SortTask:
    """Accuracy from 0 to 1, counts of inputs, and times: medians per input, and of a long generation by round."""

    accuracy: float  # on held-out inputs
    steps: int
    n_test: int
    n_inputs: int
    n_identical: int  # inputs with the same greedy output with and without a cache
    n_identical_sampled: int
    generate_ms: float
    generate_kv_ms: float
    long_generate_s: list[float]
    long_generate_kv_s: list[float]
    long_identical: bool
    seconds: float = 0  # in all
    threads: int = 1

    @property
    def failures(self) -> list[str]:
        if self.accuracy < 1:
            return [f"not sorted after {self.steps} steps: raise --steps or try another --seed"]
        identical = self.n_identical == self.n_identical_sampled == self.n_inputs and self.long_identical
        return [] if identical else ["generate and generate_kv differ: the cache changes the output"]


def splits(length: int, n_digits: int) -> tuple[Tensor, Tensor]:
    """All inputs (n, length), split into training and test; the same split in every run."""
    inputs = torch.cartesian_prod(*[torch.arange(n_digits)] * length)
    test = torch.tensor([hashlib.sha256(bytes(row)).digest()[0] % 4 == 0 for row in inputs.tolist()])
    return inputs[~test], inputs[test]


def accuracy(model: GPT, inputs: Tensor) -> float:
    """The share of inputs (n, length) that the model sorts, greedily."""
    answers = model.generate(inputs, inputs.size(1))[:, inputs.size(1) :]
    return float((answers == inputs.sort(1).values).all(1).double().mean())


def learn(model: GPT, train: Tensor, test: Tensor, max_steps: int) -> int:
    """Train until every test input is sorted, or for max_steps; returns the steps taken."""
    optimizer = model.configure_optimizers(TRAIN_CONFIG)
    for step in range(1, max_steps + 1):
        model.train()
        digits = train[torch.randint(len(train), (BATCH_SIZE,))]
        sequence = torch.cat([digits, digits.sort(1).values], dim=1)
        targets = sequence[:, 1:].clone()
        targets[:, : digits.size(1) - 1] = -1  # the next digit of the input is not predictable
        _, loss = model(sequence[:, :-1], targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVAL_INTERVAL == 0 or step == max_steps:
            share = accuracy(model.eval(), test)
            progress(f"step {step}  loss {loss.item():.4f}  sorts {100 * share:.1f}% of {len(test)} held-out inputs")
            if share == 1:
                return step
    return max_steps


def compare(model: GPT, twin: GPT_kv, inputs: Tensor, sampled: bool) -> tuple[int, float, float]:
    """Count inputs (n, length) with the same output from both models, one by one; also the median ms of each."""
    n_identical = 0
    times: tuple[list[float], list[float]] = ([], [])
    for seed, row in enumerate(inputs):
        outputs = []
        for generate, elapsed in zip((model.generate, twin.generate_kv), times):
            torch.manual_seed(seed)
            started = time.perf_counter()
            outputs.append(generate(row[None], len(row), TEMPERATURE if sampled else 1.0, sampled))
            elapsed.append(1000 * (time.perf_counter() - started))
        n_identical += torch.equal(*outputs)
    return n_identical, median(times[0]), median(times[1])


@torch.no_grad()
def time_long_generation(rounds: int, n_tokens: int) -> tuple[list[float], list[float], bool]:
    """Seconds of gpt-mini with random weights, without and with a cache, and whether the greedy tokens are the same."""
    model = GPT_kv(GPTConfig("gpt-mini", vocab_size=9, block_size=500)).eval()
    idx = torch.tensor([PROMPT])
    calls = {"": partial(model.generate, idx, n_tokens), "_kv": partial(model.generate_kv, idx, n_tokens)}
    identical = torch.equal(*(call() for call in calls.values()))  # warms up both
    timings = interleave({name: partial(measure_seconds, call) for name, call in calls.items()}, rounds, warmup=0)
    return timings[""], timings["_kv"], identical


def sort_task(
    max_steps: int = 5000, length: int = 6, n_digits: int = 3, *, seed: int = 0, threads: int = 1,
    rounds: int = 10, n_tokens: int = N_TOKENS,
) -> SortTask:  # fmt: skip
    """Train gpt-nano to sort, compare `generate` and `generate_kv` on every input, and time a long generation."""
    started = time.perf_counter()
    before = torch.get_num_threads()
    train, test = splits(length, n_digits)
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            trained = GPT_kv(GPTConfig("gpt-nano", vocab_size=n_digits, block_size=2 * length - 1))
            steps = learn(trained, train, test, max_steps)
            model = GPT(trained.config).eval()
            model.load_state_dict(trained.state_dict())
            inputs = torch.cat([train, test])
            progress(f"comparing generate and generate_kv on {len(inputs)} inputs, greedily, then sampled")
            n_identical, ms, kv_ms = compare(model, trained, inputs, sampled=False)
            n_sampled, *_ = compare(model, trained, inputs, sampled=True)
            progress(f"timing {n_tokens} tokens of gpt-mini with and without a cache, {rounds} rounds")
            long = time_long_generation(rounds, n_tokens)
            share = accuracy(model, test)
    finally:
        torch.set_num_threads(before)
    seconds = time.perf_counter() - started
    return SortTask(share, steps, len(test), len(inputs), n_identical, n_sampled, ms, kv_ms, *long, seconds, threads)


def summary(result: SortTask) -> str:
    """The result for a terminal."""
    uncached = result.long_generate_s
    cached = result.long_generate_kv_s
    threads = "one thread" if result.threads == 1 else f"{result.threads} threads"
    return (
        f"gpt-nano, {result.steps} steps: sorts {100 * result.accuracy:.1f}% of {result.n_test} held-out inputs\n"
        f"identical with and without cache, greedy:  {result.n_identical} of {result.n_inputs}\n"
        f"identical with and without cache, sampled: {result.n_identical_sampled} of {result.n_inputs}\n"
        f"one input, median: generate {result.generate_ms:.2f} ms, generate_kv {result.generate_kv_ms:.2f} ms\n"
        f"{N_TOKENS} tokens of gpt-mini, mean of {len(cached)} rounds, {threads}:\n"
        f"  without KV caching: {fmean(uncached):.3f} +- {pstdev(uncached):.3f} s\n"
        f"  with KV caching:    {fmean(cached):.3f} +- {pstdev(cached):.3f} s, {fmean(uncached) / fmean(cached):.2f}x, "
        f"{'the same tokens' if result.long_identical else 'OTHER TOKENS'}"
    )


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--steps", type=positive, default=5000, metavar="N", help="training steps at most (default: 5000)")
    add("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: 0)")
    add("--rounds", type=positive, default=10, metavar="N", help="timings of the long generation (default: 10)")
    command.add_threads_flag(parser, default="1")


def measure(args: argparse.Namespace) -> command.Measured:
    result = sort_task(args.steps, seed=args.seed, rounds=args.rounds, threads=args.threads)
    return asdict(result), summary(result), f"{command.environment()}; {result.seconds:.0f} s in all", result.failures


main = partial(command.run, "sort_task", __doc__, add_flags, measure)

if __name__ == "__main__":
    sys.exit(main())
