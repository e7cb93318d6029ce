"""The verb `caption` for many pictures: folders, patterns and lists, whose captions go into files."""

import argparse
import codecs
import glob
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from models.decoding import SamplingParams
from nanovlm.bulk.captioning import BulkCaptioner
from nanovlm.bulk.outputs import Sidecars, Table, check_table
from nanovlm.bulk.resume_log import FailureLog, file_lock
from nanovlm.cli.caption import check
from nanovlm.cli.options import ModelOptions, load_captioner
from nanovlm.console import print_error
from nanovlm.data.folders import list_images
from nanovlm.data.source import IMAGE_EXTENSIONS
from nanovlm.device import peak_memory
from nanovlm.errors import UsageError

SETTINGS = (  # of two runs that are one and the same, interrupted
    *("existing", "prefix", "suffix", "prompt", "model", "revision", "max_new_tokens", "max_tiles", "upscale"),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"),
)


def names_many(args: argparse.Namespace) -> bool:
    """Whether captions go to files: the names are a list, folders or patterns, or args say where to."""
    return (args.list, args.out) != (None, None) or any(
        os.path.isdir(name) or is_pattern(name) for name in args.pictures
    )


def caption_files(args: argparse.Namespace) -> int:
    """Caption what args name into files; 1 if a picture could not be, after the others have been."""
    sampling = check_files(args)
    pictures, lost = find_pictures([*args.pictures, *(read_list(args.list) if args.list is not None else [])])
    with ExitStack() as held:
        for place, lock in locks(args).items():
            held.enter_context(file_lock(lock, place))
        return caption_found(args, sampling, pictures, lost)


def caption_found(
    args: argparse.Namespace, sampling: SamplingParams, pictures: list[str], lost: list[tuple[str, str]]
) -> int:
    """Caption those of the pictures that have no caption yet; lost are those already known to have none, and why."""
    results = open_results(args)
    failures = FailureLog(results.home)
    lost = lost + [(picture, reason) for picture in pictures if (reason := results.refuse(picture))]
    for name, reason in lost:
        failures.add(name, reason)
    refused = {name for name, _ in lost}
    todo = [picture for picture in pictures if picture not in refused and not results.done(picture)]
    there, said = sum(picture not in refused for picture in pictures) - len(todo), ""
    if there:
        said = f"{there:,} had captions already"
        if args.existing != "skip":
            said = f"{there:,} have got theirs from this command; to do them again, remove {results.record.path}"
    if todo:
        captioner = load_captioner(ModelOptions.from_args(args), args.prompts, args.max_new_tokens, own_images=True)
        run = BulkCaptioner(captioner, args.prompt, {"max_new_tokens": args.max_new_tokens, "sampling": sampling})
        try:
            run(
                todo,
                args.batch_size or run.batch_size,
                lambda picture, text: results.write(picture, around(args, text)),
                failures.add,
            )
        except KeyboardInterrupt:
            print_error(f"stopped after {run.done:,} of {len(todo):,} pictures; the same command goes on")
            raise
        said = "; ".join(filter(None, [run.summary(), said]))
        if args.stats:
            said += f"; model busy {run.busy:.0%} of the time, peak memory "
            said += f"{peak_memory(captioner.model.device) / 2**20:,.0f} MiB"
    results.end()
    if failures.count:
        said += f"{'; ' * bool(said)}{failures.count:,} failed" + f", see {failures.path}" * failures.written
    print_error(said)
    return 1 if failures.count else 0


def check_files(args: argparse.Namespace) -> SamplingParams:
    """Refuse what makes no sense for files, and fill in what was not said."""
    if args.json:
        raise UsageError("--json is for captions on standard output; write a table by --out captions.jsonl")
    if args.samples != 1:
        raise UsageError(f"--samples {args.samples} is for captions on standard output; a file holds one of each")
    if "-" in args.pictures:
        raise UsageError("- is a picture without a name, of which no file can tell; name files, folders or a --list")
    if len(args.prompts or ()) > 1:
        raise UsageError(f"{len(args.prompts)} prompts are for captions on standard output; a file holds one of each")
    if args.batch_size is not None and args.batch_size < 1:
        raise UsageError(f"--batch-size {args.batch_size} is less than 1")
    if not args.pictures and args.list is None:
        raise UsageError(f"--out {args.out}, but no pictures; name files or folders, or give their names by --list")
    for flag in ("prefix", "suffix"):
        try:
            (getattr(args, flag) or "").encode()
        except UnicodeEncodeError:
            raise UsageError(f"--{flag} {getattr(args, flag)!r} is no Unicode text") from None
    if not beside(args):
        check_table(Path(args.out))
    args.existing = args.existing or "skip"
    return check(args)


def around(args: argparse.Namespace, text: str) -> str:
    return f"{args.prefix or ''}{text.strip()}{args.suffix or ''}"


def beside(args: argparse.Namespace) -> bool:
    return args.out in (None, "txt")


def locks(args: argparse.Namespace) -> dict[str, Path]:
    """What this run writes to, and the file by which no other does so at once."""
    if not beside(args):
        out = Path(args.out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {args.out}: its folder cannot be made: {error.strerror}") from None
        return {args.out: out.with_name(f".{out.name}.lock")}
    folders = {os.path.realpath(name): name for name in args.pictures if os.path.isdir(name)} or {".": "."}
    return {name: Path(name, ".captions.lock") for name in folders.values()}


def open_results(args: argparse.Namespace) -> Sidecars | Table:
    settings = {name: str(getattr(args, name)) for name in SETTINGS}
    if beside(args):
        return Sidecars(Path(next(filter(os.path.isdir, args.pictures), ".")), args.existing, settings)
    return Table(Path(args.out), args.existing, settings)


# ------------------------------------------------------------------------------------------------ finding pictures


def is_pattern(name: str) -> bool:
    return glob.has_magic(name) and not os.path.lexists(name)  # a file named [1].png is that file


def read_list(file: str) -> list[str]:
    """Names from a file, or from standard input (-): one a line, or each ended by a zero byte."""
    if file == "-" and sys.stdin is None:
        raise UsageError("--list - reads names from standard input, which is closed")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"--list {file}: {error.strerror}") from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # as PowerShell writes
        data = data.decode("utf-16", "replace").encode()
    data = data.removeprefix(codecs.BOM_UTF8)
    names = data.split(b"\0") if b"\0" in data else data.splitlines()
    return [os.fsdecode(name) for name in names if name.strip()]


def find_pictures(names: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The pictures that files, folders and patterns name, each once, in that order; and what could not be, and why."""
    found, lost = {}, []

    def inside(folder: str) -> list[str]:
        unread: list[OSError] = []
        here = [os.path.join(folder, picture) for picture in list_images(folder, unread.append)]
        lost.extend((error.filename, error.strerror) for error in unread)
        if not here and not unread:
            lost.append((folder, "a folder without pictures"))
        return here

    for name in names:
        if os.path.isdir(name):
            here = inside(name)
        elif is_pattern(name):
            matches = sorted(glob.glob(name, recursive=True))
            here = [match for match in matches if os.path.splitext(match)[1].lower() in IMAGE_EXTENSIONS]
            here += [picture for match in matches if os.path.isdir(match) for picture in inside(match)]
            if not here:
                lost.append((name, "a pattern that fits no picture"))
        else:
            here = [name]
        for picture in here:
            found.setdefault(os.path.abspath(picture), picture)
    return list(found.values()), lost
