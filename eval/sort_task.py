"""minGPT's sorting task, learned by gpt-nano, and the check that a KV cache does not change the output.

    python -m eval.sort_task

The task is Karpathy's: read six digits from 0 to 2, write them sorted. A quarter of the 729 inputs, chosen by a hash of
the input, is held out; training stops once all of them are sorted. Then `GPT.generate` and `GPT_kv.generate_kv` answer
all 729 inputs, greedily and sampled, and must agree. At twelve tokens a cache saves little time.
"""

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor

from eval.lib.command import make_parser, positive, progress, report
from eval.lib.hardware import environment
from models.mingpt import GPT, GPT_kv, GPTConfig

BATCH_SIZE, LEARNING_RATE, EVAL_INTERVAL = 64, 5e-4, 100  # the first two are minGPT's
TEMPERATURE = 3.0  # high enough that a confident model still samples different tokens


@dataclass(frozen=True)
class SortTask:
    """Accuracy from 0 to 1, counts of inputs, and median times per input."""

    accuracy: float  # on held-out inputs
    steps: int
    n_test: int
    n_inputs: int
    n_identical: int  # inputs with the same greedy output with and without a cache
    n_identical_sampled: int
    generate_ms: float
    generate_kv_ms: float
    seconds: float

    @property
    def failures(self) -> list[str]:
        if self.accuracy < 1:
            return [f"not sorted after {self.steps} steps: raise --steps or try another --seed"]
        identical = self.n_identical == self.n_identical_sampled == self.n_inputs
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


def learn(model: GPT, train: Tensor, test: Tensor, max_steps: int, log: Callable[[str], None]) -> int:
    """Train until every test input is sorted, or for max_steps; returns the steps taken."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
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
            log(f"step {step}  loss {loss.item():.4f}  sorts {100 * share:.1f}% of {len(test)} held-out inputs")
            if share == 1:
                return step
    return max_steps


def compare(model: GPT, twin: GPT_kv, inputs: Tensor, sampled: bool) -> tuple[int, float, float]:
    """How many inputs (n, length) get the same output from both, one by one, and the median ms of each."""
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


def sort_task(
    max_steps: int = 5000, length: int = 6, n_digits: int = 3, seed: int = 0, log: Callable[[str], None] = progress
) -> SortTask:
    """Train gpt-nano to sort, then compare `generate` and `generate_kv` on every possible input."""
    started = time.perf_counter()
    train, test = splits(length, n_digits)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(GPTConfig("gpt-nano", vocab_size=n_digits, block_size=2 * length - 1))
        steps = learn(model, train, test, max_steps, log)
        twin = GPT_kv(model.config).eval()
        twin.load_state_dict(model.state_dict())
        inputs = torch.cat([train, test])
        log(f"comparing generate and generate_kv on {len(inputs)} inputs, greedily, then sampled")
        n_identical, generate_ms, generate_kv_ms = compare(model, twin, inputs, sampled=False)
        n_identical_sampled, *_ = compare(model, twin, inputs, sampled=True)
    return SortTask(
        accuracy(model, test), steps, len(test), len(inputs), n_identical, n_identical_sampled,
        round(generate_ms, 3), round(generate_kv_ms, 3), round(time.perf_counter() - started, 1),
    )  # fmt: skip


def summary(result: SortTask) -> str:
    """The result for a terminal."""
    return (
        f"gpt-nano, {result.steps} steps: sorts {100 * result.accuracy:.1f}% of {result.n_test} held-out inputs\n"
        f"identical with and without cache, greedy:  {result.n_identical} of {result.n_inputs}\n"
        f"identical with and without cache, sampled: {result.n_identical_sampled} of {result.n_inputs}\n"
        f"one input, median: generate {result.generate_ms:.2f} ms, generate_kv {result.generate_kv_ms:.2f} ms"
    )


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("sort_task", __doc__)
    parser.add_argument(
        "--steps", type=positive, default=5000, metavar="N", help="training steps at most (default: 5000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: 0)")
    args = parser.parse_args(argv)
    result = sort_task(args.steps, seed=args.seed)
    where = f"{environment()}; {result.seconds:.0f} s in all"
    return report(asdict(result), summary(result), where, args.json, result.failures)


if __name__ == "__main__":
    sys.exit(main())
