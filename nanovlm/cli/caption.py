"""`nanovlm caption`: captions of images on standard output, in files, or from a Ray cluster."""

import argparse
import codecs
import glob
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.common import files
from nanovlm.cli.options import (
    MODEL_FLAGS,
    add_record_flags,
    from_args,
    load_captioner,
    model_options,
    refuse_flags,
    report_missing,
)
from nanovlm.console import count, has_terminal, is_terminal, print_error, print_text, printable, slow
from nanovlm.embedded import EMBEDDED, EMBEDDED_LIMITS, PROMPT, SAMPLE
from nanovlm.errors import FileError, ImageError, InputError, UsageError, is_out_of_memory
from nanovlm.options import RESERVED, CaptionOptions, GenerationOptions, ModelOptions, check_positive
from nanovlm.processing import MAX_FRAMES, VIDEO_EXTENSIONS

if TYPE_CHECKING:
    from nanovlm.bulk import Report
    from nanovlm.captioner import Captioner

CHECKPOINT = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
HELP = "Caption images, or answer a prompt about each; without arguments, the sample image."
EXAMPLE = f"""\
nanovlm caption photo.jpg --prompt "What is on the table?"
nanovlm caption photos --out photos/metadata.jsonl --model {CHECKPOINT}
nanovlm caption photos --choices cat,dog,neither --out labels.jsonl --model {CHECKPOINT}"""

FILES = {  # flag: placeholder, help
    "--from-file": ("FILE", "more names, one a line or separated by zero bytes; - is standard input"),
    "--out": ("FILE", "a .jsonl table; txt: a .txt beside each image (default for folders)"),
    "--extension": ("EXT", "of the files beside images, such as .caption (default: .txt)"),
    "--prefix": ("TEXT", "text before each caption; {folder} is the name of the image's folder"),
}
FILE_FLAGS = ("overwrite", "prefix", "extension", "workers")
GENERATION_FLAGS = ("temperature", "top_p", "seed", "max_new_tokens", "repetition_penalty", "start_with")
ADDRESS = re.compile(r"|auto|local|ray://.+|[^/\s]+:\d+")  # of a Ray cluster
REASONS = {
    "length": "cut at --max-new-tokens; raise it",
    "repetition": "ended at a repetition; try --repetition-penalty 1.2",
}
LONG_S = 10.0  # seconds after which an answer is worth a line about faster ways
N_NAMES = 5  # of images that a summary names
STATS_DIGITS = {"prompt_tokens": None, "new_tokens": None, "first_token_s": 4, "total_s": 4, "tokens_per_s": 1}


def add_flags(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    names = "images, videos, folders or quoted patterns; - is an image on standard input. "
    names += "Of folders and patterns captions are written to files"
    files.add_argument("images", nargs="*", metavar="IMAGE", help=names)
    for flag, (metavar, text) in FILES.items():
        files.add_argument(flag, metavar=metavar, help=text)
    add = files.add_argument
    text = "caption images that have captions, too; all: also those that a person wrote or edited"
    add("--overwrite", nargs="?", const=True, metavar="all", help=text)
    add("--json", action="store_true", help="print one JSON object per image and prompt")
    text = "caption on this Ray cluster (default: one that runs, else this machine) into parquet files in the folder "
    add("--ray", nargs="?", const="", metavar="ADDRESS", help=text + "or URI --out")
    add("--workers", type=int, metavar="N", help="with --ray: at most N models at once (default: by GPUs, or cores)")
    answers = parser.add_argument_group("how answers are made")
    add = answers.add_argument
    text = "repeat it for several, which a table has columns for; {folder} is the name of the image's folder "
    text += f"(default: that of the model's training, else {PROMPT!r})"
    add("--prompt", dest="prompts", action="append", metavar="TEXT", help=text)
    add("--choices", metavar="A,B,...", help="answer with the most probable of these, and say how probable it is")
    add("--json-schema", metavar="FILE", help="JSON schema that each answer follows (extra structured)")
    add("--as-video", action="store_true", help="read GIF, WebP, a folder or several images as one video, by content")
    add_record_flags(answers, GenerationOptions, GENERATION_FLAGS)
    add_record_flags(parser.add_argument_group("the model"), ModelOptions, MODEL_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Print captions, or write them to files if args name several images at once or an output file."""
    if args.overwrite not in (None, True, "all"):  # --overwrite photos
        args.images.insert(0, args.overwrite)
        args.overwrite = True
    model = model_options(args)
    options = caption_options(args, model)
    several = not options.as_video and any(map(names_several, args.images))
    if args.ray is not None or args.from_file or args.out or several:
        report = caption_names(args, [*args.images, *read_names(args.from_file)], model, options)
        beside = f".{(args.extension or 'txt').removeprefix('.')} files beside the images"
        print_summary(report, "" if args.json else beside if args.out in (None, "txt") else args.out)
        return 1 if report.failed else 0
    refuse_flags(args, FILE_FLAGS, "files: name a folder, or a file by --out")
    if report_missing(args.images):
        return 1
    if options.as_video and not args.images:
        raise UsageError("--as-video needs names of frames or videos")
    return print_captions(args, model, options)


def names_several(name: str) -> bool:
    """Check whether a name is that of a folder, or a pattern: a file may be named [1].png."""
    return os.path.isdir(name) or (glob.has_magic(name) and not os.path.lexists(name))


def caption_options(args: argparse.Namespace, model: ModelOptions) -> CaptionOptions:
    """Settings of each answer. UsageError for flags that exclude each other, before any work."""
    prompts = args.prompts or [PROMPT]
    schema = None
    choices: tuple[str, ...] = ()
    if not all(map(str.strip, prompts)):
        raise UsageError("--prompt is empty; omit it to have the image described")
    if len(prompts) != len(set(prompts)) or RESERVED & set(prompts):
        names = ", ".join(sorted(RESERVED))
        raise UsageError(f"--prompt is given twice, or is one of {names}; each names a column of its own")
    if args.choices is not None:
        choices = tuple(map(str.strip, args.choices.split(",")))
        if len(set(choices)) < max(2, len(choices)) or not all(choices):
            raise UsageError(f"--choices {args.choices}: name two or more different answers, such as red,green,blue")
        refuse_flags(args, ("json_schema", "start_with", "temperature"), "generated answers: omit it, or --choices")
    if args.json_schema:
        from nanovlm.processing.structured_output import read_schema

        schema = read_schema(args.json_schema)
    if len(prompts) > 1 and (schema is not None or choices):
        raise UsageError(f"{len(prompts)} prompts with --json-schema or --choices, which are for one; ask one")
    if args.prefix and (schema is not None or len(prompts) > 1):
        raise UsageError("--prefix: several prompts or a schema give JSON, to which no text can be added; omit it")
    are_videos = [Path(name).suffix.lower() in VIDEO_EXTENSIONS and not os.path.isdir(name) for name in args.images]
    if any(are_videos) and not (all(are_videos) or args.as_video):
        raise UsageError("videos and images are captioned by commands of their own; name either")
    from_args(GenerationOptions, args, schema=schema)  # an error comes before a Hub model is downloaded for its prompt
    args.choices = choices
    args.as_video = args.as_video or any(are_videos)
    args.prompts = tuple(args.prompts or [model.prompt])
    return from_args(CaptionOptions, args, schema=schema, max_frames=args.max_tiles or MAX_FRAMES)


def caption_names(args: argparse.Namespace, names: list[str], model: ModelOptions, options: CaptionOptions) -> "Report":
    """Caption what is named into files, or on a Ray cluster into parquet files."""
    from nanovlm.bulk import caption_files
    from nanovlm.outputs import Output, Sidecars, Table

    def check_model_named() -> None:
        if args.model is None and args.adapter is None:
            raise UsageError(f"{EMBEDDED_LIMITS}; name another by --model {CHECKPOINT}, or --model embedded")

    def load() -> "Captioner":
        check_model_named()
        return load_captioner(model, options.prompts, options.max_new_tokens, images=names)

    if args.ray is not None and not ADDRESS.fullmatch(args.ray):
        raise UsageError(f"--ray {args.ray} is no address like auto or ray://HOST:10001; name images before --ray")
    if "-" in names or not names:
        raise UsageError("captions in files need names of images; name files or folders, or list them by --from-file")
    if args.ray is not None:
        refuse_flags(args, ("extension", "overwrite"), "one machine: omit it, or --ray")
        check_positive({"--workers": args.workers})
        if args.out is None or re.search(r"\.(jsonl|parquet)$|^txt$", args.out):
            out = args.out or "is missing: it"
            raise UsageError(f"--out {out} must be a folder or URI for parquet files with --ray")
        if args.json or options.as_video:
            raise UsageError("--ray writes captions of images; omit --json and --as-video")
        check_model_named()
        from nanovlm.ray_captions import caption_on_ray

        return caption_on_ray(names, args.out, model, options, address=args.ray or None, workers=args.workers)
    refuse_flags(args, ["workers"], "captions on a cluster: add --ray")
    output: Output
    if args.json:
        refuse_flags(args, ("out", "extension", "overwrite"), "captions in files: omit it, or --json")
        output = Output()
    elif args.out in (None, "txt"):
        output = Sidecars(checked_extension(args.extension or ".txt"), args.overwrite or False)
    else:
        refuse_flags(args, ["extension"], f"files beside images, not for {args.out}: omit it, or --out")
        if not args.out.endswith(".jsonl"):
            raise UsageError(f"--out {args.out} must be a .jsonl file, or txt")
        output = Table(args.out, args.overwrite or False)
    return caption_files(load, names, output, options, model=model_label(model))


def model_label(model: ModelOptions) -> str:
    """The name that is kept with each caption."""
    label = "embedded" if model.model == EMBEDDED else str(model.model)
    return label + (f" + {model.adapter}" if model.adapter else "")


def checked_extension(extension: str) -> str:
    from nanovlm.processing.image_loading import IMAGE_EXTENSIONS, readable_extensions

    extension = f".{extension.removeprefix('.')}"
    if not re.fullmatch(r"\.[^/\\\0.]+", extension) or extension.lower() in readable_extensions() | IMAGE_EXTENSIONS:
        raise UsageError(f"--extension {extension} is not like .txt or .caption, or is that of images")
    return extension


def read_names(file: str | None) -> list[str]:
    """Names from a file, if any, or from standard input (-): one a line, or each ended by a zero byte."""
    if file is None:
        return []
    try:
        data = standard_input().read() if file == "-" else files.read_pipe(file)
    except FileError as error:
        raise UsageError(f"--from-file {error}") from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # as PowerShell writes
        data = data.decode("utf-16", "replace").encode()
    data = data.removeprefix(codecs.BOM_UTF8)
    names = data.split(b"\0") if b"\0" in data else data.splitlines()
    return [os.fsdecode(name) for name in names if name.strip()]


def print_summary(report: "Report", place: str) -> None:
    """Print what a run did and where it is, and then a line for each thing that a person may want to look at."""
    from nanovlm.processing.image_loading import HEIF_EXTENSIONS, INSTALL_HEIC

    parts = []
    where = f", in {printable(place)}" if place and (report.captioned or report.skipped) else ""
    if report.captioned or not (report.skipped or report.kept):
        rate = f" ({60 * report.captioned / report.seconds:,.0f} a minute)" if report.seconds > 1 else ""
        parts.append(f"{report.captioned:,} captioned in {report.seconds:.0f} s{rate}{where}")
    if report.skipped:
        parts.append(f"{len(report.skipped):,} had captions" + ("" if parts else where))
    parts += [f"{len(report.failed):,} failed"] if report.failed else []
    for extension, n in report.left_out.items():
        hint = f" (to read them: {INSTALL_HEIC})" if extension in HEIF_EXTENSIONS else ""
        parts.append(f"{n:,} {extension} left out{hint}")
    if parts:
        print_error("; ".join(parts))
    if report.kept:
        verb = "is" if len(report.kept) == 1 else "are"
        texts = f"{count(len(report.kept), 'text')} that a person wrote or edited {verb} kept"
        print_error(f"{texts}; --overwrite all replaces what a person wrote, too")
    for origin, n in report.others.items():
        print_error(f"{count(n, 'existing caption')} of another run, with {origin}; --overwrite replaces what is old")
    for reason, images in report.cut.items():
        verb = "was" if len(images) == 1 else "were"
        print_error(f"{count(len(images), 'caption')} {verb} {REASONS.get(reason, reason)}: {some(images)}")


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - N_NAMES:,} more" if len(names) > N_NAMES else ""
    return ", ".join(map(printable, names[:N_NAMES])) + more


def print_captions(args: argparse.Namespace, model: ModelOptions, options: CaptionOptions) -> int:
    """Print the captions of some images; 1 if one of them failed, after the others are done."""
    longest = 1 if options.choices else options.max_new_tokens
    captioner = load_captioner(model, options.prompts, longest, images=args.images)
    ways = ["--max-tiles 4"] if model.max_tiles is None and captioner.processor.max_tiles_per_image > 5 else []
    ways += ["--quantize int8"] if model.quantize is None else []
    names: list[Any] = args.images or [str(SAMPLE)]
    failed = 0
    if options.as_video and len(names) > 1 and not any(Path(name).suffix in VIDEO_EXTENSIONS for name in names):
        names = [names]  # the frames of one video
    for name in names:
        try:
            seconds = print_caption(args, captioner, options, name)
            if seconds > LONG_S and ways and has_terminal():
                print_error(slow(f"this took {seconds:.0f} s", ways))
        except ImageError as error:
            print_error(str(error))
            failed = 1
        except Exception as error:
            if not (isinstance(error, InputError) or is_out_of_memory(error)):
                raise
            print_error(f"{name}: {error or 'not enough memory'}")
            failed = 1
    return failed


def print_caption(
    args: argparse.Namespace, captioner: "Captioner", options: CaptionOptions, source: str | list[str]
) -> float:
    """Print the answers about an image, as JSON, as a line each or, on a terminal, token by token; returns seconds."""
    from nanovlm.request_runner import Stats

    name = source if isinstance(source, str) else source[0]
    image: Any = standard_input() if name == "-" else source
    if options.as_video:
        from nanovlm.processing.video import Video

        image = Video.read(source, options.max_frames)
    stats = Stats()
    prompts = [options.filled(prompt, name) for prompt in options.prompts]
    columns: dict[str, Any] = {}
    lines: list[str] = []
    label = f"{printable(name)}: " if len(args.images) > 1 and isinstance(source, str) else ""
    if options.choices:
        best = captioner.classify(image, options.choices, prompts[0])[0]
        texts = [best.text]
        columns = best.columns()
        lines = [f"{best.text} ({best.probability:.0%}, log-probability {best.log_probability:.1f})"]
    elif is_terminal(sys.stdout) and not args.json and len(prompts) == 1:
        texts = [""]
        for piece in captioner.stream(image, prompts[0], options=options, stats=stats):
            print_text(piece if texts[0] else label + piece, end="")
            texts[0] += piece
        print("" if texts[0] else label)
    else:
        texts = captioner.ask(image, prompts, options=options, stats=stats)
        if options.schema is not None:
            texts = [json.dumps(value, ensure_ascii=False) for value in texts]
        lines = [" ".join(text.splitlines()) for text in texts]
        columns = {name: round(getattr(stats, name), digits) for name, digits in STATS_DIGITS.items()}
    if args.json:
        kind = "video" if options.as_video else "image"
        for prompt, text, reason in zip(prompts, texts, stats.finish_reasons or ["stop"]):
            row = {kind: name, "prompt": prompt, "text": text, "finish_reason": reason}
            print(json.dumps(row | columns), flush=True)
    else:
        for line in lines:
            print_text(label + line)
    if not all(options.has_answer(text) for text in texts):
        raise ImageError(f"{name}: the model's answer is empty")
    return stats.total_s


def standard_input() -> Any:
    if sys.stdin is None or sys.stdin.isatty():
        raise ImageError("<stdin>: - reads standard input; redirect a file to it")
    return sys.stdin.buffer
