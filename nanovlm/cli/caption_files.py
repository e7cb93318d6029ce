"""`nanovlm caption` of folders, patterns and lists: captions are written to files, here or on a Ray cluster."""

import argparse
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from nanovlm.bulk import BulkOptions, BulkReport, OutputOptions, caption_images
from nanovlm.bulk.options import SIDECARS, STREAM
from nanovlm.cli.options import EMBEDDED_NOTE, from_args, load_captioner, model_options
from nanovlm.console import print_error
from nanovlm.device import choose_device, peak_memory
from nanovlm.embedded import EMBEDDED
from nanovlm.errors import UsageError
from nanovlm.options import GenerationOptions, check_positive
from nanovlm.processing.image_loading import HEIF_EXTENSIONS, INSTALL_HEIC

ADDRESS = re.compile(r"auto|local|ray://.+|[^/\s]+:\d+")  # of a Ray cluster
NOT_ON_RAY = ("json", "existing", "extension", "as_video")  # flags of one machine
MIN_RATED_CAPTIONS, MIN_RATED_SECONDS = 10, 1.0  # of a run whose summary tells its rate


def caption_files(args: argparse.Namespace, generation: GenerationOptions) -> int:
    """Caption what args name into files, as JSON lines, or into parquet files by Ray; 1 if an image failed."""
    on_ray = args.ray is not None
    (check_ray_flags if on_ray else check_file_flags)(args)
    model = model_options(args)
    output, options = output_options(args, generation.schema), bulk_options(args, generation)
    load = partial(load_captioner, model, args.prompts, generation.max_new_tokens, own_images=not on_ray)
    selection = {"names_file": args.from_file, "recursive": args.recursive is not False, "limit": args.limit}
    caption: Callable[..., BulkReport]
    if on_ray:
        from nanovlm.bulk.ray_captioning import RayOptions, caption_on_ray

        cluster = from_args(RayOptions, args, address=args.ray or None)
        caption = partial(caption_on_ray, load, args.images, cluster, options, output)
    else:
        caption = partial(caption_images, load, args.images, options, output)
    if on_ray and model.model == EMBEDDED and model.adapter is None:
        print_error(EMBEDDED_NOTE)  # here, as the workers print theirs elsewhere
    report = caption(**selection)
    print_error(summary(report, output.existing))
    if args.stats and report.captioned and not on_ray:
        memory = peak_memory(choose_device(model.device)) / 2**20
        print_error(f"model busy {report.utilization:.0%} of the time, peak memory {memory:,.0f} MiB")
    return 1 if report.failed else 0


def bulk_options(args: argparse.Namespace, generation: GenerationOptions) -> BulkOptions:
    """The settings of the parsed flags for each image."""
    prompt = args.prompts[0] if len(args.prompts) == 1 else tuple(args.prompts)
    return from_args(BulkOptions, args, prompt=prompt, schema=generation.schema)


def output_options(args: argparse.Namespace, schema: Any) -> OutputOptions:
    """The output settings of the parsed flags; --json prints captions."""
    extension = args.extension or ".txt"
    columns: tuple[str, ...] = ()
    if schema is not None:
        if args.prefix:
            raise UsageError("--json-schema: captions are JSON, to which no text can be added; omit --prefix")
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        columns = tuple(name for name in properties if name not in ("file_name", "text"))
    elif len(args.prompts) > 1:
        columns = tuple(args.prompts)
    return OutputOptions(
        out=STREAM if args.json else SIDECARS if args.out is None or args.ray is not None else args.out,
        existing=args.existing or "skip",
        prefix=args.prefix or "",
        extension=extension if extension.startswith(".") else f".{extension}",
        name_key="image" if args.json else "file_name",  # as --json names single images
        columns=columns,
    )


def check_file_flags(args: argparse.Namespace) -> None:
    """Refuse flags that make no sense for files, before any work."""
    if args.json and args.out not in (None, STREAM):
        raise UsageError("--json is for captions on standard output; write a table by --out captions.jsonl")
    if args.samples != 1:
        raise UsageError(f"--samples {args.samples} is for captions of single images; here each gets one")
    if "-" in args.images:
        raise UsageError("- is an image without a name, so no file can refer to it; name files, folders or --from-file")
    if len(args.prompts) != len(set(args.prompts)) or {"file_name", "text"} & set(args.prompts):
        raise UsageError("--prompt is given twice, or is file_name or text; each names a column of its own")
    if len(args.prompts) > 1 and args.prefix:
        raise UsageError("--prompt: answers to several are JSON, to which no text can be added; omit --prefix")
    if not args.images and args.from_file is None:
        raise UsageError(f"--out {args.out}, but no images; name files or folders, or list them by --from-file")


def check_ray_flags(args: argparse.Namespace) -> None:
    """Refuse flags and values that make no sense on a cluster, before any work."""
    if args.ray and not ADDRESS.fullmatch(args.ray):
        raise UsageError(f"--ray {args.ray} is no address like auto or ray://HOST:10001; name images before --ray")
    for flag in NOT_ON_RAY:
        if getattr(args, flag) not in (None, False):
            raise UsageError(f"--{flag.replace('_', '-')} is for one machine; leave it or --ray away")
    check_positive({"--limit": args.limit})
    if args.out is None or args.out in ("txt", "-") or re.search(r"\.(jsonl|parquet)$", args.out):
        given = "missing" if args.out is None else args.out
        raise UsageError(f"--out {given} with --ray must be a folder, or the URI of one, for parquet files")
    if args.samples != 1 or len(args.prompts) > 1:
        raise UsageError("--ray gives each image one caption; leave out --samples, and run it once for each --prompt")
    if "-" in args.images or not (args.images or args.from_file):
        raise UsageError("--ray needs names of images or folders, or --from-file")


def summary(report: BulkReport, existing: str) -> str:
    """One line for people: what was captioned, what was done already, what failed, what was left out."""
    parts = []
    if report.captioned or report.seconds:
        is_rated = report.captioned >= MIN_RATED_CAPTIONS and report.seconds >= MIN_RATED_SECONDS
        rate = f" ({report.per_minute:,.0f} a minute)" if is_rated else ""
        parts.append(f"{report.captioned:,} captioned in {report.seconds:.0f} s{rate}")
    if report.repeated:
        parts.append(f"{report.repeated:,} ended early as they repeated themselves")
    if report.already_done:
        parts.append(f"{report.already_done:,} had captions already")
    if report.failed:
        empty = f" ({report.empty:,} with an empty caption)" if report.empty else ""
        parts.append(f"{report.failed:,} failed{empty}" + (f", see {report.failures}" if report.failures else ""))
    if report.remaining:
        hint = "; run the same command for the next" if existing == "skip" else ""
        parts.append(f"{report.remaining:,} remain{hint}")
    hints = dict.fromkeys(HEIF_EXTENSIONS, f" (to read them: {INSTALL_HEIC})")
    parts += [f"{n:,} {extension} left out{hints.get(extension, '')}" for extension, n in report.left_out.items()]
    return "; ".join(parts) or "no images"
