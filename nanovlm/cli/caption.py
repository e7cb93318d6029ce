"""`nanovlm caption`: pictures in, one line each out."""

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from nanovlm import PROMPT, SAMPLE
from nanovlm.cli.options import GenerationOptions, ModelOptions, add_generation_flags, load_captioner
from nanovlm.console import print_error
from nanovlm.errors import ImageError, UsageError, is_out_of_memory

if TYPE_CHECKING:
    import torch

    from models.decoding import SamplingParams
    from nanovlm.captioner import Captioner, Stats

HELP = "Caption pictures, or answer a prompt about each; without arguments, the sample picture."
EXAMPLE = "nanovlm caption photos --out photos/metadata.jsonl"

MAX_NEW_TOKENS = 128
LENGTHS = {  # a prompt, and the longest answer
    "short": ("Describe this picture in a few words.", 48),
    "normal": (PROMPT, MAX_NEW_TOKENS),
    "long": ("Describe this picture in detail.", 384),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "pictures",
        nargs="*",
        metavar="PICTURE",
        help="files; folders and quoted patterns, whose captions are written to files; - is a picture on standard "
        "input; none is the sample picture",
    )
    add("--list", metavar="FILE", help="more names, one a line or as find -print0 writes them; - is standard input")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        metavar="TEXT",
        help=f"what to ask of each picture ({PROMPT!r}); given again, another question, for which it is not read again",
    )
    asked.add_argument("--length", choices=("short", "normal", "long"), help="ask for a caption so long")
    add("--out", metavar="FILE", help=".jsonl, .csv or .parquet of file_name and text; txt: beside each (of a folder)")
    add(
        "--existing",
        choices=("skip", "overwrite", "append", "prepend"),
        help="what becomes of captions already there (skip)",
    )
    add("--prefix", metavar="TEXT", help="put before each caption in a file, as it stands")
    add("--suffix", metavar="TEXT", help="put after it")
    add(
        "--batch-size",
        type=int,
        metavar="N",
        help="pictures of a folder that run at once, a small model's on each core (16, or 128 where each is one image)",
    )
    add("--max-new-tokens", type=int, metavar="N", help="longest answer (128; --length: short 48, long 384)")
    add("--samples", type=int, default=1, metavar="N", help="answers per picture, which is read once (1)")
    add_generation_flags(parser)
    add("--json", action="store_true", help="one object per picture and prompt, with token counts and timings")
    add("--stats", action="store_true", help="timings and peak memory on standard error")


def run(args: argparse.Namespace) -> int:
    from nanovlm.cli.caption_files import caption_files, names_many

    return caption_files(args) if names_many(args) else caption_pictures(args)


def caption_pictures(args: argparse.Namespace) -> int:
    """Caption args.pictures; 1 if one of them could not be, after the others have been."""
    for flag in ("existing", "prefix", "suffix", "batch_size"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} is for files: name a folder, or where captions go by --out")
    from nanovlm.captioner import Stats
    from nanovlm.image_processing import load_image

    sampling = check(args)
    started = time.perf_counter()
    captioner = load_captioner(
        ModelOptions.from_args(args), args.prompts, args.max_new_tokens, own_images=bool(args.pictures)
    )
    loaded = time.perf_counter() - started
    failed = 0
    for name in args.pictures or [str(SAMPLE)]:
        try:
            picture = load_image(standard_input() if name == "-" else name)
            stats = Stats()
            texts = say(args, captioner, name, picture, sampling, stats)
        except ImageError as error:
            print_error(str(error))
        except Exception as error:
            if not isinstance(error, ValueError) and not is_out_of_memory(error):
                raise
            print_error(f"{name}: {error or 'not enough memory'}")
        else:
            if args.json:
                for prompt, text in zip(args.prompts, texts):
                    print(json.dumps(record(args, name, prompt, text, texts, stats)), flush=True)
            if args.stats:
                print_error(summary(stats, loaded, captioner.model.device))
            continue
        failed += 1
    return 1 if failed else 0


def check(args: argparse.Namespace) -> "SamplingParams":
    """Refuse numbers and combinations that make no sense, before any work; make of --length a prompt."""
    args.prompts = args.prompts or [PROMPT]
    if args.length:
        args.prompts[0], longest = LENGTHS[args.length]
        args.max_new_tokens = longest if args.max_new_tokens is None else args.max_new_tokens
    args.prompt = args.prompts[0]
    if args.max_new_tokens is None:
        args.max_new_tokens = MAX_NEW_TOKENS
    for name, least in (("samples", 1), ("max_new_tokens", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than {least}")
    if args.samples > 1 and len(args.prompts) > 1:
        raise UsageError(f"--samples {args.samples} of {len(args.prompts)} prompts; ask for samples of one at a time")
    if args.samples > 1 and args.temperature == 0:
        raise UsageError(f"--samples {args.samples} at temperature 0 would all be alike; add --temperature 0.7, say")
    return GenerationOptions.from_args(args).sampling


def standard_input():
    if sys.stdin is None or sys.stdin.isatty():
        raise ImageError(
            "<stdin>: - reads a picture from standard input, but that is a terminal; redirect a file to it"
        )
    return sys.stdin.buffer


def say(args, captioner: "Captioner", name: str, picture, sampling: "SamplingParams", stats: "Stats") -> list[str]:
    """Find the answers and, unless they go into JSON, print each as one line; on a terminal, as it is found."""
    from nanovlm.image_processing import printable

    options = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "stats": stats}
    label = f"{printable(name)}: " if len(args.pictures) > 1 else ""
    several = args.samples > 1 or len(args.prompts) > 1
    if several or args.json or not (sys.stdout and sys.stdout.isatty()):
        if len(args.prompts) > 1:
            texts = captioner.ask(picture, args.prompts, **options)
        else:
            texts = captioner.samples(picture, args.prompt, args.samples, **options)
        if not args.json:
            print("".join(label + " ".join(text.splitlines()) + "\n" for text in texts), end="", flush=True)
        return texts
    pieces = captioner.stream(picture, args.prompt, **options)
    first = next(pieces, "")  # an error comes before the label
    print(label + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return []


def record(args: argparse.Namespace, name: str, prompt: str, text: str, texts: list[str], stats: "Stats") -> dict:
    """The JSON object of one picture and prompt; times in seconds. Counts and times are of all its prompts together."""
    return {
        "picture": name,
        "prompt": prompt,
        "text": text,
        **({"samples": texts} if args.samples > 1 else {}),
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "first_token_s": round(stats.first_token_s, 4),
        "total_s": round(stats.total_s, 4),
        "tokens_per_s": round(stats.tokens_per_s, 1),
    }


def summary(stats: "Stats", loaded: float, device: "torch.device") -> str:
    from nanovlm.device import peak_memory

    return (
        f"model loaded in {loaded:.2f} s; {stats.prompt_tokens} tokens read, first answer token after "
        f"{stats.first_token_s * 1000:.0f} ms, then {stats.tokens_per_s:.0f} tokens/s; "
        f"peak memory {peak_memory(device) / 2**20:,.0f} MiB"
    )
