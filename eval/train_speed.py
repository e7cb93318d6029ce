"""How fast a step of training is, at a published shape with random weights: in bfloat16, and with rows packed.

    python -m eval.train_speed

First, four rows of 128 tokens, an image among them, in bfloat16 and in float32: nanoVLM's step on a CPU is the latter,
for which ours stands in, the same operations on the same tensors. Second, eight examples whose words are 8 to 448
tokens, evenly on a logarithmic scale, as one-word answers and chats mix: a padded row for each, and packed rows.

A step is what `nanovlm.training.loop.train` does for one: forward, backward, clipping and AdamW. Ways take turns; figures
are medians over rounds, in tokens of examples a second, so that padding counts for nothing. It fails below 2 times
float32's speed, and below 1.5 times that of padded rows.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from eval.lib.command import make_parser, positive, progress, report
from eval.lib.hardware import environment
from eval.lib.shapes import SHAPES
from eval.lib.timing import synchronize
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm.data.examples import IGNORE_INDEX, EncodedExample, collate
from nanovlm.data.packing import pack
from nanovlm.device import DTYPES, choose_device
from nanovlm.training.config import FINETUNING
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.loop import Batch, backward, to_device
from nanovlm.training.optimizer import adamw

IMAGE_TOKEN = -1  # no word's id, so that every id can be drawn
BARS = {"bfloat16": 2.0, "packed": 1.5}


@dataclass(frozen=True)
class Way:
    """One of two ways to learn from the same examples."""

    name: str
    batch: Batch
    dtype: torch.dtype
    tokens: int  # of the examples, without padding


def row(cfg: VLMConfig, words: int) -> EncodedExample:
    """An image of noise and so many random words, of which the last half are the answer."""
    ids = torch.randint(cfg.lm_vocab_size, (words,)).tolist()
    asked = cfg.mp_image_token_length + words // 2
    read = [IMAGE_TOKEN] * cfg.mp_image_token_length + ids
    targets = [IGNORE_INDEX] * (asked - 1) + read[asked:] + [0]
    return EncodedExample(read, targets, [1] * len(read), [torch.rand(1, 3, cfg.vit_img_size, cfg.vit_img_size)])


def precisions(cfg: VLMConfig, length: int, rows: int = 4) -> list[Way]:
    """Rows of length tokens in float32, then in bfloat16."""
    batch = collate([row(cfg, length - cfg.mp_image_token_length) for _ in range(rows)])
    return [Way(name, batch, DTYPES[name], rows * length) for name in ("float32", "bfloat16")]


def mixed(cfg: VLMConfig, shortest: int, longest: int, n: int = 8) -> list[Way]:
    """n examples of mixed lengths, padded, then packed into rows as long as the longest; both in bfloat16."""
    rows = [row(cfg, round(shortest * (longest / shortest) ** (i / (n - 1)))) for i in range(n)]
    tokens, most = sum(len(one.ids) for one in rows), max(len(one.ids) for one in rows)
    return [
        Way("padded", collate(rows), torch.bfloat16, tokens),
        Way("packed", collate(pack(rows, most)), torch.bfloat16, tokens),
    ]


def stepper(model: VisionLanguageModel) -> Callable[[Way], float]:
    """way -> the seconds of a step."""
    optimizer = adamw(model, FINETUNING)
    world, scaler = DistributedContext(model.device), torch.amp.GradScaler(model.device.type, enabled=False)

    def step(way: Way) -> float:
        synchronize(model.device)
        started = time.perf_counter()
        backward(model, [to_device(way.batch, model.device)], way.dtype, scaler, world)
        nn.utils.clip_grad_norm_(model.parameters(), FINETUNING.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(model.device)
        return time.perf_counter() - started

    return step


def measure(model: VisionLanguageModel, ways: Sequence[Way], rounds: int) -> dict[str, float]:
    """Tokens a second of each way, in rounds in which they take turns."""
    step, seconds = stepper(model), {way.name: [] for way in ways}
    for way in ways:
        step(way)  # the first of anything is slow
    for turn in range(1, rounds + 1):
        for way in ways:
            seconds[way.name].append(step(way))
            progress(f"round {turn}/{rounds}: {way.name}, a step of {seconds[way.name][-1]:.2f} s")
    return {way.name: way.tokens / median(seconds[way.name]) for way in ways}


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("train_speed", __doc__)
    parser.add_argument("--shape", default="222M", choices=tuple(SHAPES), help="(222M)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="of which medians are taken (3)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="(auto)")
    args = parser.parse_args(argv)
    try:
        device = choose_device(args.device)
    except ValueError as error:
        parser.error(str(error))

    cfg, _ = SHAPES[args.shape]
    torch.manual_seed(0)
    model = VisionLanguageModel(cfg, IMAGE_TOKEN).to(device).train()
    results, lines, failures = [], [], []
    for ways in (precisions(cfg, 128), mixed(cfg, 8, 448)):
        slow, fast = (way.name for way in ways)
        speed = measure(model, ways, args.rounds)
        gain = speed[fast] / speed[slow]
        results.append({"tokens_per_s": speed, "gain": gain, "bar": BARS[fast]})
        told = "; ".join(f"{name} {tokens_per_s:,.0f} tokens/s" for name, tokens_per_s in speed.items())
        lines.append(f"{args.shape}: {told}; {gain:.2f} times as fast")
        if gain < BARS[fast]:
            failures.append(f"{fast} is {gain:.2f} times as fast as {slow}, less than {BARS[fast]:g} times")
    where = f"{environment(device)}; medians of {args.rounds} rounds"
    return report({"shape": args.shape, "results": results}, "\n".join(lines), where, args.json, failures)


if __name__ == "__main__":
    sys.exit(main())
