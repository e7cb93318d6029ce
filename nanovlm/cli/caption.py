"""The verb `caption`: pictures in, lines out, one after another, whatever becomes of one of them."""

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch

from models.decoding import SamplingParams
from nanovlm import EMBEDDED, PROMPT, SAMPLE
from nanovlm.captioner import Captioner, Stats
from nanovlm.console import print_error
from nanovlm.device import peak_memory
from nanovlm.errors import CheckpointError, ImageError, UsageError
from nanovlm.image_processing import load_image, printable

EMBEDDED_KNOWS = (
    "the embedded model knows drawn scenes of coloured shapes only, what it says of other pictures is nonsense"
)
EMBEDDED_NOTE = f"note: {EMBEDDED_KNOWS}; --model FOLDER_OR_HUB_ID names a model for photographs"

MAX_NEW_TOKENS = 128
LENGTHS = {  # a prompt, and the longest answer
    "short": ("Describe this picture in a few words.", 48),
    "normal": (PROMPT, MAX_NEW_TOKENS),
    "long": ("Describe this picture in detail.", 384),
}


def caption_pictures(args: argparse.Namespace) -> int:
    """Caption args.pictures; 1 if one of them could not be, after the others have been."""
    for flag in ("existing", "prefix", "suffix", "batch_size"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} is for files: name a folder, or where captions go by --out")
    sampling = check(args)
    started = time.perf_counter()
    captioner = read_captioner(args, args.prompts, args.max_new_tokens, shown=bool(args.pictures))
    loaded = time.perf_counter() - started
    failed = 0
    for name in args.pictures or [str(SAMPLE)]:
        try:
            picture = load_image(standard_input() if name == "-" else name)
            stats = Stats()
            texts = say(args, captioner, name, picture, sampling, stats)
        except ImageError as error:
            print_error(str(error))
        except (ValueError, MemoryError, torch.OutOfMemoryError) as error:
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


def read_captioner(args: argparse.Namespace, prompts: Sequence[str], max_new_tokens: int, shown: bool) -> Captioner:
    """The model that args.model names, if it can answer the prompts at all; shown are pictures of one's own."""
    if args.max_tiles is not None and args.max_tiles < 1:
        raise UsageError(f"--max-tiles {args.max_tiles} is less than 1; with 1 a picture is squeezed into one tile")
    try:
        if args.compile:
            print_error("note: compiling the decode step takes a minute or two, the first time for a model's shape")
        budget = {"max_tiles": args.max_tiles, "upscale": args.upscale}
        speed = {"quantize": args.quantize, "compile": args.compile}
        captioner = Captioner.from_pretrained(args.model, args.device, args.dtype, args.revision, **budget, **speed)
        for prompt in prompts:
            captioner.check_prompt(prompt, max_new_tokens)
    except (CheckpointError, ValueError) as error:
        raise UsageError(error) from None
    except RuntimeError as error:
        if not args.compile:
            raise
        raise UsageError(f"--compile: {str(error).splitlines()[0]}") from None
    if args.model == EMBEDDED and shown:
        print_error(EMBEDDED_NOTE)
    return captioner


def check(args: argparse.Namespace) -> SamplingParams:
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
    return read_sampling(args)


def read_sampling(args: argparse.Namespace) -> SamplingParams:
    try:
        return SamplingParams(**{name: getattr(args, name) for name in SamplingParams.__dataclass_fields__})
    except ValueError as error:
        raise UsageError(error) from None


def standard_input():
    if sys.stdin is None or sys.stdin.isatty():
        raise ImageError(
            "<stdin>: - reads a picture from standard input, but that is a terminal; redirect a file to it"
        )
    return sys.stdin.buffer


def say(args, captioner: Captioner, name: str, picture, sampling: SamplingParams, stats: Stats) -> list[str]:
    """Find the answers and, unless they go into JSON, print each as one line; on a terminal, as it is found."""
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


def record(args: argparse.Namespace, name: str, prompt: str, text: str, texts: list[str], stats: Stats) -> dict:
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


def summary(stats: Stats, loaded: float, device: torch.device) -> str:
    return (
        f"model loaded in {loaded:.2f} s; {stats.prompt_tokens} tokens read, first answer token after "
        f"{stats.first_token_s * 1000:.0f} ms, then {stats.tokens_per_s:.0f} tokens/s; "
        f"peak memory {peak_memory(device) / 2**20:,.0f} MiB"
    )
