"""`nanovlm caption`: captions of images on standard output, or in files (see `caption_files`)."""

import argparse
import glob
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nanovlm.cli.options import add_flags as add_record_flags
from nanovlm.cli.options import (
    add_model_flags,
    check_prompts,
    from_args,
    load_captioner,
    model_options,
    refuse_flags,
    report_missing,
)
from nanovlm.console import TileProgress, is_terminal, print_error, print_remedy, print_text
from nanovlm.embedded import PROMPT, SAMPLE
from nanovlm.errors import ImageError, InputError, UsageError, is_out_of_memory
from nanovlm.options import GenerationOptions, ModelOptions, check_positive
from nanovlm.processing import MAX_FRAMES, VIDEO_EXTENSIONS

if TYPE_CHECKING:
    import torch

    from nanovlm.captioner import Captioner, Stats
    from nanovlm.processing.video import Video

HELP = "Caption images, or answer a prompt about each; without arguments, the sample image."
EXAMPLE = "nanovlm caption photos --out photos/metadata.jsonl"

FILE_FLAGS = ("existing", "prefix", "extension", "batch_size", "limit", "recursive")

STATS_DIGITS = {  # fields of Stats that --json prints, and how they are rounded
    "prompt_tokens": None, "new_tokens": None, "first_token_s": 4, "total_s": 4, "tokens_per_s": 1, "cache_bytes": None,
}  # fmt: skip


@dataclass(frozen=True)
class PrintOptions:
    """What is asked about each of single images or videos, and how answers are printed."""

    images: Sequence[str]
    prompts: Sequence[str]
    samples: int = 1
    json: bool = False
    stats: bool = False
    quiet: bool = False
    as_video: bool = False
    max_frames: int = MAX_FRAMES
    frames: Sequence[str] = ()  # files of the one video that images names

    def image(self, name: str) -> "str | BinaryIO | Video":
        """The image or video of a name."""
        if not self.as_video:
            return standard_input() if name == "-" else name
        from nanovlm.processing.video import Video

        return Video.read(self.frames or name, self.max_frames)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "images",
        nargs="*",
        metavar="IMAGE",
        help="image files, folders or quoted patterns; captions of folders and patterns are written to files unless "
        "--json prints them; - reads an image from standard input (default: the sample image)",
    )
    add(
        "--from-file",
        metavar="FILE",
        help="more names from FILE, one a line or separated by zero bytes (find -print0); - is standard input",
    )
    add(
        "--prompt",
        dest="prompts",
        action="append",
        metavar="TEXT",
        help="prompt for each image; repeat it to ask several, for which the image is encoded once; a table has a "
        f"column for each (default: {PROMPT!r})",
    )
    add("--samples", type=int, default=1, metavar="N", help="answers per image, which is encoded once (default: 1)")
    add(
        "--as-video",
        action="store_true",
        help="read a GIF, WebP, folder or several images as the frames of a video; with --out, each video, GIF and "
        "WebP of the folders is described as a whole",
    )
    add("--max-frames", type=int, metavar="N", help="frames of a video that the model sees (default: 8)")
    add_file_flags(parser)
    add_ray_flags(parser)
    add_record_flags(parser, GenerationOptions)
    add("--json-schema", metavar="FILE", help="JSON schema that each answer follows (extra structured)")
    add_model_flags(parser)
    add(
        "--json",
        action="store_true",
        help="print one object per image and prompt, for single images with token counts and timings",
    )
    add(
        "--stats", action="store_true", help="print timings, the size of the KV cache and peak memory on standard error"
    )
    add("--quiet", action="store_true", help="show no progress, and no advice on speed, on a terminal")


def add_file_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for captions that are written to files."""
    add = parser.add_argument_group("captions in files").add_argument
    add(
        "--out",
        metavar="FILE",
        help="a .jsonl file; txt: a .txt beside each image (default for folders); -: JSON lines on standard output",
    )
    add("--extension", metavar="EXT", help="of the files beside images, such as .caption (default: .txt)")
    add(
        "--existing",
        choices=("skip", "overwrite"),
        help="what to do where a caption exists (default: skip)",
    )
    add("--prefix", metavar="TEXT", help="text before each caption, added without a space")
    add(
        "--batch-size",
        type=int,
        metavar="N",
        help="images decoded at once, on each core for a small model (default: 16, or 128 without tiling)",
    )
    add("--limit", type=int, metavar="N", help="caption at most N images; the same command then captions the next")
    add("--recursive", action=argparse.BooleanOptionalAction, help="search subfolders, too (default: yes)")


def add_ray_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for captions on a Ray cluster."""
    add = parser.add_argument_group("captions on a Ray cluster (extra ray)").add_argument
    add(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="caption files and folders, by path or URI, on the cluster at this address, into parquet files in the "
        "folder or URI --out (default: a cluster that runs already, else this machine)",
    )
    add(
        "--cpus-per-worker",
        type=int,
        metavar="N",
        help="cores of each worker (default: 1 beside a GPU, of which each worker has one, else 4)",
    )


def run(args: argparse.Namespace) -> int:
    """Print captions, or write them to files if args name several images at once or an output file."""
    on_ray, are_frames = args.ray is not None, args.as_video and len(args.images) > 1
    args.as_video = names_video(args)
    are_several = not args.as_video and any(map(names_several, args.images))
    to_files = on_ray or (args.from_file, args.out) != (None, None) or are_several
    if not on_ray:
        refuse_flags(args, ["cpus_per_worker"], "captions on a cluster: add --ray")
    if args.as_video and not (to_files or args.images):
        raise UsageError("--as-video needs names of frames or videos")
    if not to_files:
        refuse_flags(args, FILE_FLAGS, "files: name a folder, or a file by --out")
    args.prompts, model, schema = args.prompts or [PROMPT], model_options(args), None
    if not all(map(str.strip, args.prompts)):
        raise UsageError("--prompt is empty; omit it to have the image described")
    if args.json_schema:
        from nanovlm.processing.structured_output import read_schema

        schema = read_schema(args.json_schema)
    generation = from_args(GenerationOptions, args, schema=schema)
    check_samples(args.samples, len(args.prompts), generation)
    if to_files:
        from nanovlm.cli.caption_files import caption_files

        return caption_files(args, generation)
    if report_missing(args.images):
        return 1
    if are_frames:
        args.frames, args.images = args.images, args.images[:1]
    return print_captions(from_args(PrintOptions, args), generation, model)


def names_several(name: str) -> bool:
    """Whether a name is that of a folder, or a pattern: a file may be named [1].png."""
    return os.path.isdir(name) or (glob.has_magic(name) and not os.path.lexists(name))


def names_video(args: argparse.Namespace) -> bool:
    """Whether args name video files or, with --as-video, frames. UsageError for videos beside images."""
    check_positive({"--max-frames": args.max_frames})
    are_videos = [Path(name).suffix.lower() in VIDEO_EXTENSIONS and not Path(name).is_dir() for name in args.images]
    if args.as_video or (are_videos and all(are_videos)):
        return True
    if any(are_videos):
        raise UsageError("videos and images are captioned by commands of their own; name either")
    if args.max_frames is not None:
        raise UsageError("--max-frames is for videos: name a video file, or add --as-video")
    return False


def check_samples(n: int, n_prompts: int, generation: GenerationOptions) -> None:
    """Refuse numbers of samples that make no sense."""
    check_positive({"--samples": n})
    if n > 1 and n_prompts > 1:
        raise UsageError(f"--samples {n} of {n_prompts} prompts; ask for samples of one at a time")
    if n > 1 and generation.temperature == 0:
        raise UsageError(f"--samples {n} at temperature 0 are all the same; add --temperature 0.7, say")


def print_captions(options: PrintOptions, generation: GenerationOptions, model: ModelOptions) -> int:
    """Print the captions of some images; 1 if one of them failed, after the others are done."""
    started = time.perf_counter()
    captioner = load_captioner(model, own_images=bool(options.images))
    load_seconds = time.perf_counter() - started
    if not options.quiet:
        captioner.inference.on_tile = TileProgress()
    ways = ["--max-tiles 4"] if model.max_tiles is None and captioner.processor.max_tiles_per_image > 5 else []
    ways += ["--quantize int8"] if model.quantize is None else []
    failed = 0
    for name in options.images or [str(SAMPLE)]:
        try:
            stats, texts = print_caption(options, captioner, generation, name)
        except ImageError as error:
            print_error(str(error))
            failed += 1
        except Exception as error:
            if isinstance(error, InputError):
                check_prompts(captioner, options.prompts, generation.max_new_tokens)
            elif not is_out_of_memory(error):
                raise
            print_error(f"{name}: {error or 'not enough memory'}")
            failed += 1
        else:
            if not all(text.removeprefix(generation.start_with.rstrip()).strip() for text in texts):
                print_error(f"{name}: the model's answer is empty")
                failed += 1
            if not options.quiet:
                print_remedy(stats.total_s, ways)
            if options.stats:
                print_error(format_stats(stats, load_seconds, captioner.inference.device))
    return 1 if failed else 0


def print_caption(
    options: PrintOptions, captioner: "Captioner", generation: GenerationOptions, name: str
) -> tuple["Stats", list[str]]:
    """Print the answers about one image, as JSON, as a line each or, on a terminal, token by token; and return them."""
    from nanovlm.captioner import Stats
    from nanovlm.processing.image_loading import printable

    image, stats, prompts, n = options.image(name), Stats(), options.prompts, options.samples
    label = f"{printable(name)}: " if len(options.images) > 1 else ""
    if is_terminal(sys.stdout) and not options.json and n == len(prompts) == 1:
        return stats, [stream_caption(captioner.stream(image, prompts[0], options=generation, stats=stats), label)]
    if len(prompts) > 1:
        texts = captioner.ask(image, prompts, options=generation, stats=stats)
    else:
        texts = captioner.samples(image, prompts[0], n, options=generation, stats=stats)
    if generation.schema is not None:
        texts = [json.dumps(value, ensure_ascii=False) for value in texts]
    if options.json:
        kind = "video" if options.as_video else "image"
        for prompt, text, reason in zip(prompts, texts, stats.finish_reasons):
            samples = {"samples": texts} if n > 1 else {}
            row = {kind: name, "prompt": prompt, "text": text, "finish_reason": reason}
            print(json.dumps(row | samples | stats_fields(stats)), flush=True)
    else:
        for text in texts:
            print_text(label + " ".join(text.splitlines()))
    return stats, texts


def stream_caption(pieces: Iterator[str], label: str) -> str:
    """Print the pieces of an answer as they come; returns the whole."""
    text = next(pieces, "")  # an error is raised before the label is printed
    print_text(label + text, end="")
    for piece in pieces:
        print_text(piece, end="")
        text += piece
    print()
    return text


def standard_input() -> BinaryIO:
    if sys.stdin is None or sys.stdin.isatty():
        raise ImageError("<stdin>: - reads an image from standard input; redirect a file to it")
    return sys.stdin.buffer


def stats_fields(stats: "Stats") -> dict[str, float]:
    """Token counts and seconds of one image, all prompts together, as --json prints them."""
    return {name: round(getattr(stats, name), digits) for name, digits in STATS_DIGITS.items()}


def format_stats(stats: "Stats", load_seconds: float, device: "torch.device") -> str:
    from nanovlm.device import peak_memory

    return (
        f"model loaded in {load_seconds:.2f} s; {stats.prompt_tokens} prompt tokens, first token after "
        f"{stats.first_token_s * 1000:.0f} ms, then {stats.tokens_per_s:.0f} tokens/s; "
        f"KV cache {stats.cache_bytes / 2**20:.2f} MiB; "
        f"peak memory {peak_memory(device) / 2**20:,.0f} MiB"
    )
