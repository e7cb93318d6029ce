"""Throughput: images captioned per minute, one call at a time and in a folder.

    python -m eval.throughput                                # the embedded model on 500 drawn images
    python -m eval.throughput --model-size 230M --images 24  # a published size, random weights

Drawn scenes of 96 to 1024 pixels a side as PNG, JPEG and WebP are captioned one by one and as a folder, in interleaved
rounds. Figures are medians; the command fails if an image gets no caption.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import perf_counter

from eval.lib.command import add_device_flags, make_parser, positive, report
from eval.lib.hardware import environment
from eval.lib.random_model import random_model_folder
from eval.lib.shapes import SHAPES
from eval.lib.timing import interleave
from nanovlm import EMBEDDED
from nanovlm.bulk import OutputOptions, caption_images
from nanovlm.captioner import Captioner
from nanovlm.data.jsonl import read_jsonl
from nanovlm.errors import NanoVLMError
from nanovlm.synthetic import draw, random_scene

IMAGE_SIZES = (96, 1024)  # pixels
IMAGE_FORMATS = ("png", "jpg", "webp")


def write_images(folder: Path, n: int, seed: str) -> list[str]:
    """Write n drawn scenes of random sizes and file formats; returns their paths."""
    rng = Random(f"throughput {seed}")
    paths = [folder / f"{i:05}.{rng.choice(IMAGE_FORMATS)}" for i in range(n)]
    for path in paths:
        draw(random_scene(rng), rng.randint(*IMAGE_SIZES), rng.randint(*IMAGE_SIZES)).save(path)
    return [str(path) for path in paths]


def measure_captioning(captioner: Captioner, n: int, seed: str, rounds: int) -> dict:
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


def load_captioner(model: str, size: str | None, device: str, dtype: str) -> Captioner:
    """The model to caption with; a size stands for a published model with random weights."""
    if size is None:
        return Captioner.from_pretrained(model, device, dtype)
    with random_model_folder(size) as folder:
        return Captioner.from_pretrained(folder, device, dtype)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("throughput", __doc__)
    add = parser.add_argument
    add("--model", default=EMBEDDED, metavar="FOLDER_OR_HUB_ID", help="(default: the embedded model)")
    add("--model-size", choices=tuple(SHAPES), help="a published size, random weights, instead of --model")
    add("--images", type=positive, default=500, metavar="N", help="images in the folder (default: 500)")
    add("--rounds", type=positive, default=5, metavar="N", help="interleaved rounds (default: 5)")
    add("--seed", default="1", help="which images (default: 1)")
    add_device_flags(parser)
    args = parser.parse_args(argv)
    try:
        captioner = load_captioner(args.model, args.model_size, args.device, args.dtype)
        data = measure_captioning(captioner, args.images, args.seed, args.rounds)
    except NanoVLMError as error:
        parser.error(str(error))
    failures = [f"no caption for {reason}" for reason in data["failed"]]
    where = environment(captioner.inference.device, captioner.inference.dtype)
    return report(data, captioning_table(data), f"{where}; medians of {args.rounds} rounds", args.json, failures)


if __name__ == "__main__":
    sys.exit(main())
