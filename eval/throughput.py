"""Throughput: images captioned per minute in a folder, or with --train tokens learned per second.

    python -m eval.throughput                               # the embedded model on 500 drawn images
    python -m eval.throughput --model-size 230M --images 24  # a published shape, random weights
    python -m eval.throughput --train                       # training steps at the 222M shape, random weights

Captioning: drawn scenes of 96 to 1024 pixels a side as PNG, JPEG and WebP are captioned one call at a time and as one
folder, in interleaved rounds. Figures are medians; the command fails if an image gets no caption.

Training: the first comparison takes a batch of four rows of 128 tokens, an image in each, in float32 (nanoVLM's step on
a CPU) and in bfloat16. The second takes eight examples of 8 to 448 text tokens, evenly spaced on a logarithmic scale,
padded and packed. Figures are medians of interleaved rounds in tokens of examples per second; padding does not count.
The command fails if bfloat16 is less than 2 times as fast as float32, or packing less than 1.5 times as padding.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter

import torch
from torch import nn

from eval.lib.command import add_device_flags, make_parser, positive, progress, report
from eval.lib.hardware import environment
from eval.lib.random_model import write_random_model
from eval.lib.shapes import SHAPES
from eval.lib.timing import interleave, measure_seconds
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED
from nanovlm.bulk import OutputOptions, caption_images
from nanovlm.captioner import Captioner
from nanovlm.data.examples import IGNORE_INDEX, EncodedExample, collate
from nanovlm.data.jsonl import read_jsonl
from nanovlm.data.packing import pack
from nanovlm.device import DTYPES, choose_device
from nanovlm.errors import NanoVLMError
from nanovlm.synthetic import draw, random_scene
from nanovlm.training.backward import backward, to_device
from nanovlm.training.config import FINETUNING
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.loader import Batch
from nanovlm.training.optimizer import make_optimizer

IMAGE_SIZES = (96, 1024)  # pixels
IMAGE_FORMATS = ("png", "jpg", "webp")
ROUNDS = 5
IMAGE_TOKEN = -1  # outside the vocabulary, so that random ids never hit it
MIN_SPEEDUPS = {"bfloat16": 2.0, "packed": 1.5}


def write_images(folder: Path, n: int, seed: str) -> list[str]:
    """Write n drawn scenes of random sizes and file formats; returns their paths."""
    rng = Random(f"throughput {seed}")
    paths = [folder / f"{i:05}.{rng.choice(IMAGE_FORMATS)}" for i in range(n)]
    for path in paths:
        draw(random_scene(rng), rng.randint(*IMAGE_SIZES), rng.randint(*IMAGE_SIZES)).save(path)
    return [str(path) for path in paths]


def measure_captioning(captioner: Captioner, n: int, seed: str, rounds: int = ROUNDS) -> dict:
    """Images per minute of single calls and of one folder, and how many captions agree.

    Each round captions its share of the images one by one, then the whole folder.
    """
    with tempfile.TemporaryDirectory() as name:
        images = write_images(Path(name), n, seed)
        rounds = min(rounds, n)
        shares = [images[start::rounds] for start in range(rounds)]
        captions: dict[str, str] = {}
        failures: list[str] = []
        busy: list[float] = []

        def one_by_one() -> float:
            share, started = shares.pop(), perf_counter()
            captions.update((image, captioner.caption(image)) for image in share)
            return (perf_counter() - started) / len(share)

        def folder() -> float:
            run = caption_images(captioner, [name], output=OutputOptions(existing="overwrite"))
            busy.append(run.utilization)
            if run.failures:
                failures.extend(f"{row['file_name']}: {row['reason']}" for row in read_jsonl(run.failures))
            return run.seconds / n

        captioner.caption(images[0])  # warm up
        timings = interleave({"one by one": one_by_one, "folder": folder}, rounds, warmup=0)
        texts = {image: Path(image).with_suffix(".txt") for image in captions}
        same = sum(path.exists() and path.read_text("utf-8").strip() == captions[image].strip()
                   for image, path in texts.items())  # fmt: skip
    single, bulk = (timings[name].median for name in ("one by one", "folder"))
    return {
        "images": n,
        "one_by_one_per_minute": round(60 / single),
        "folder_per_minute": round(60 / bulk),
        "speedup": round(single / bulk, 2),
        "model_busy": round(sorted(busy)[len(busy) // 2], 3),
        "same_captions": same,
        "failed": failures,
    }


def captioning_table(result: dict) -> str:
    return (
        f"one by one       {result['one_by_one_per_minute']:7,} images/minute\n"
        f"folder of {result['images']:<6,} {result['folder_per_minute']:7,} images/minute, "
        f"{result['speedup']:.1f}x; model busy {result['model_busy']:.0%} of the time\n"
        f"same captions    {result['same_captions']:7,} of {result['images']:,}"
    )


@dataclass(frozen=True)
class TrainingBatch:
    """A batch, the precision to learn it in, and the tokens of its examples without padding."""

    name: str
    batch: Batch
    dtype: torch.dtype
    tokens: int


def random_example(cfg: VLMConfig, text_tokens: int) -> EncodedExample:
    """A random image and random text tokens, of which the last half are the answer."""
    ids = [IMAGE_TOKEN] * cfg.mp_image_token_length + torch.randint(cfg.lm_vocab_size, (text_tokens,)).tolist()
    answer = cfg.mp_image_token_length + text_tokens // 2
    targets = [IGNORE_INDEX] * (answer - 1) + ids[answer:] + [0]
    return EncodedExample(ids, targets, [1] * len(ids), [torch.rand(1, 3, cfg.vit_img_size, cfg.vit_img_size)])


def precision_batches(cfg: VLMConfig, length: int = 128, rows: int = 4) -> list[TrainingBatch]:
    """The same rows of `length` tokens in float32 and in bfloat16."""
    batch = collate([random_example(cfg, length - cfg.mp_image_token_length) for _ in range(rows)])
    return [TrainingBatch(name, batch, DTYPES[name], rows * length) for name in ("float32", "bfloat16")]


def packing_batches(cfg: VLMConfig, shortest: int = 8, longest: int = 448, n: int = 8) -> list[TrainingBatch]:
    """The same n examples of mixed lengths, padded and packed to the length of the longest; both in bfloat16."""
    examples = [random_example(cfg, round(shortest * (longest / shortest) ** (i / (n - 1)))) for i in range(n)]
    lengths = [len(example.ids) for example in examples]
    return [
        TrainingBatch("padded", collate(examples), torch.bfloat16, sum(lengths)),
        TrainingBatch("packed", collate(pack(examples, max(lengths))), torch.bfloat16, sum(lengths)),
    ]


def make_step(model: VisionLanguageModel) -> Callable[[TrainingBatch], float]:
    """A training step as `nanovlm.training.loop.train` does it, which returns its seconds."""
    optimizer, device = make_optimizer(model, FINETUNING), model.device
    context, scaler = DistributedContext(device), torch.amp.GradScaler(device.type, enabled=False)

    def step(batch: TrainingBatch) -> float:
        def run() -> None:
            backward(model, [to_device(batch.batch, device)], batch.dtype, scaler, context)
            nn.utils.clip_grad_norm_(model.parameters(), FINETUNING.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

        return measure_seconds(run, device)

    return step


@dataclass(frozen=True)
class TrainingResult:
    """Tokens per second of a baseline and of what should be faster."""

    tokens_per_s: dict[str, float]
    speedup: float
    min_speedup: float

    @property
    def failures(self) -> list[str]:
        slow, fast = self.tokens_per_s
        if self.speedup >= self.min_speedup:
            return []
        return [f"{fast} is {self.speedup:.2f} times as fast as {slow}, less than {self.min_speedup:g} times"]


def measure_training(
    model: VisionLanguageModel, batches: Sequence[TrainingBatch], rounds: int, min_speedup: float
) -> TrainingResult:
    """Steps on two batches in interleaved rounds: the baseline first, then what should be faster."""
    step = make_step(model)
    timings = interleave({batch.name: partial(step, batch) for batch in batches}, rounds, log=progress)
    tokens_per_s = {batch.name: batch.tokens / timings[batch.name].median for batch in batches}
    slow, fast = tokens_per_s.values()
    return TrainingResult(tokens_per_s, fast / slow, min_speedup)


def run_training(
    cfg: VLMConfig, device: torch.device, rounds: int, min_speedups: dict[str, float] = MIN_SPEEDUPS
) -> list[TrainingResult]:
    """Both comparisons on one model with random weights."""
    torch.manual_seed(0)
    model = VisionLanguageModel(cfg, IMAGE_TOKEN).to(device).train()
    comparisons = precision_batches(cfg), packing_batches(cfg)
    return [measure_training(model, pair, rounds, min_speedups[pair[1].name]) for pair in comparisons]


def training_table(name: str, results: Sequence[TrainingResult]) -> str:
    lines = []
    for result in results:
        speeds = "; ".join(f"{way} {speed:,.0f} tokens/s" for way, speed in result.tokens_per_s.items())
        lines.append(f"{name}: {speeds}; {result.speedup:.2f}x")
    return "\n".join(lines)


def load_captioner(model: str, shape: str | None, device: str, dtype: str) -> Captioner:
    """The model to caption with; a shape stands for a published model with random weights."""
    if shape is None:
        return Captioner.from_pretrained(model, device, dtype)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows keeps mapped files
        write_random_model(Path(folder), SHAPES[shape][0])
        return Captioner.from_pretrained(folder, device, dtype)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("throughput", __doc__)
    add = parser.add_argument
    add("--train", action="store_true", help="measure training steps instead of captioning")
    add("--model", default=EMBEDDED, metavar="FOLDER_OR_HUB_ID", help="(default: the embedded model)")
    add("--model-size", choices=tuple(SHAPES), help="a published shape, random weights (default with --train: 222M)")
    add("--images", type=positive, default=500, metavar="N", help="images in the folder (default: 500)")
    add("--rounds", type=positive, metavar="N", help=f"interleaved rounds (default: {ROUNDS}, with --train 3)")
    add("--seed", default="1", help="which images (default: 1)")
    add_device_flags(parser)
    args = parser.parse_args(argv)
    try:
        if args.train:
            device, shape, rounds = choose_device(args.device), args.model_size or "222M", args.rounds or 3
            results = run_training(SHAPES[shape][0], device, rounds)
            data = {"model_size": shape, "results": [asdict(result) for result in results]}
            failures = [failure for result in results for failure in result.failures]
            text, where = training_table(shape, results), environment(device)
        else:
            captioner = load_captioner(args.model, args.model_size, args.device, args.dtype)
            rounds = args.rounds or ROUNDS
            data = measure_captioning(captioner, args.images, args.seed, rounds)
            failures = [f"no caption for {reason}" for reason in data["failed"]]
            device, dtype = captioner.inference.device, captioner.inference.dtype
            text, where = captioning_table(data), environment(device, dtype)
    except NanoVLMError as error:
        parser.error(str(error))
    return report(data, text, f"{where}; medians of {rounds} rounds", args.json, failures)


if __name__ == "__main__":
    sys.exit(main())
