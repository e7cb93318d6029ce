"""The verb `caption` for many pictures: folders, patterns and lists, whose captions go into files.

Threads read and resize pictures while the model speaks of others. A window of pictures is sorted by what there is to
read of each, so that the rows of a batch are alike; a row that has ended waits for its batch.
"""

import argparse
import errno
import glob
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from models.decoding import Sampling
from nanovlm.captioner import Captioner
from nanovlm.captioning import check, read_captioner
from nanovlm.complaints import UsageError, complain
from nanovlm.device import peak_memory
from nanovlm.images import PictureError, printable
from nanovlm.processor import Row
from nanovlm.progress import Progress
from nanovlm.results import Failures, Sidecars, Table
from nanovlm.sources.files import pictures_in
from nanovlm.sources.source import EXTENSIONS

BATCH_SIZE, BATCH_OF_SINGLES = 16, 64  # pictures; where each of them is one image only
WORKERS = min(8, os.cpu_count() or 1)
ROOM = 2**30  # bytes of pixels that may wait for the model
FAULTS = (ValueError, MemoryError, OSError, RuntimeError)  # of one picture; torch's lack of memory is the last
SETTINGS = (  # of two runs that are one and the same, interrupted
    *("existing", "prefix", "suffix", "prompt", "model", "revision", "max_new_tokens", "max_tiles", "upscale"),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"),
)


def names_many(args: argparse.Namespace) -> bool:
    """Whether captions go to files: the names are a list, folders or patterns, or args say where to."""
    return bool(args.list or args.out) or any(os.path.isdir(name) or is_pattern(name) for name in args.pictures)


def caption_files(args: argparse.Namespace) -> int:
    """Caption what args name into files; 1 if a picture could not be, after the others have been."""
    sampling = check_files(args)
    pictures, lost = find_pictures([*args.pictures, *(read_list(args.list) if args.list else [])])
    results = open_results(args)
    failures = Failures(results.home)
    lost += [(picture, reason) for picture in pictures if (reason := results.refuse(picture))]
    for name, reason in lost:
        failures.add(name, reason)
    refused = {name for name, _ in lost}
    todo = [picture for picture in pictures if picture not in refused and not results.done(picture)]
    there = sum(picture not in refused for picture in pictures) - len(todo)
    said = f"{there:,} had captions already" if there else ""
    if todo:
        captioner = read_captioner(args, args.prompts, args.max_new_tokens, shown=True)
        run = Run(captioner, args.prompt, {"max_new_tokens": args.max_new_tokens, "sampling": sampling})
        try:
            run(
                todo,
                args.batch_size or run.batch_size,
                lambda picture, text: results.write(picture, around(args, text)),
                failures.add,
            )
        except KeyboardInterrupt:
            complain(f"stopped after {run.done:,} of {len(todo):,} pictures; the same command goes on")
            raise
        said = "; ".join(filter(None, [run.summary(), said]))
        if args.stats:
            said += f"; model busy {run.busy / run.seconds:.0%} of the time, peak memory "
            said += f"{peak_memory(captioner.model.device) / 2**20:,.0f} MiB"
    results.end()
    if failures.count:
        said += f"{'; ' * bool(said)}{failures.count:,} failed, see {failures.path}"
    complain(said)
    return 1 if failures.count else 0


def check_files(args: argparse.Namespace) -> Sampling:
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
    if not (args.pictures or args.list):
        raise UsageError(f"--out {args.out}, but no pictures; name files or folders, or give their names by --list")
    for flag in ("prefix", "suffix"):
        try:
            (getattr(args, flag) or "").encode()
        except UnicodeEncodeError:
            raise UsageError(f"--{flag} {getattr(args, flag)!r} is no Unicode text") from None
    args.existing = args.existing or "skip"
    return check(args)


def around(args: argparse.Namespace, text: str) -> str:
    return f"{args.prefix or ''}{text.strip()}{args.suffix or ''}"


def open_results(args: argparse.Namespace) -> Sidecars | Table:
    settings = {name: str(getattr(args, name)) for name in SETTINGS}
    if args.out in (None, "txt"):
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
    names = data.split(b"\0") if b"\0" in data else data.splitlines()
    return [os.fsdecode(name) for name in names if name]


def find_pictures(names: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The pictures that files, folders and patterns name, each once, in that order; and what could not be, and why."""
    found, lost = {}, []

    def inside(folder: str) -> list[str]:
        unread: list[OSError] = []
        here = [os.path.join(folder, picture) for picture in pictures_in(folder, unread.append)]
        lost.extend((error.filename, error.strerror) for error in unread)
        if not here and not unread:
            lost.append((folder, "a folder without pictures"))
        return here

    for name in names:
        if os.path.isdir(name):
            here = inside(name)
        elif is_pattern(name):
            matches = sorted(glob.glob(name, recursive=True))
            here = [match for match in matches if os.path.splitext(match)[1].lower() in EXTENSIONS]
            here += [picture for match in matches if os.path.isdir(match) for picture in inside(match)]
            if not here:
                lost.append((name, "a pattern that fits no picture"))
        else:
            here = [name]
        for picture in here:
            found.setdefault(os.path.abspath(picture), picture)
    return list(found.values()), lost


# ------------------------------------------------------------------------------------------------------- captioning


class Run:
    """Captions of many pictures, and what they took."""

    def __init__(self, captioner: Captioner, prompt: str, options: dict[str, Any]):
        self.captioner, self.prompt, self.options = captioner, prompt, options
        self.done, self.busy, self.seconds = 0, 0.0, 0.0  # captions; seconds in the model, and in all
        cfg = captioner.model.cfg
        tiles = ((cfg.max_img_size or cfg.vit_img_size) // cfg.vit_img_size) ** 2  # the first eras know no largest size
        self.images = tiles + (tiles > 1)  # of the largest picture
        self.batch_size = BATCH_SIZE if tiles > 1 else BATCH_OF_SINGLES

    def __call__(
        self,
        pictures: Sequence[str],
        batch_size: int,
        write: Callable[[str, str], None],
        fail: Callable[[str, str], None],
    ) -> None:
        """Tell write of every picture and its caption, or fail of the picture and the reason."""
        started, failed = time.perf_counter(), 0
        progress = Progress(len(pictures))
        prepared = self.prepared(pictures, self.window(batch_size))
        try:
            for batch in batches(prepared, batch_size, self.window(batch_size)):
                for picture, text in self.answers(batch):
                    try:
                        if isinstance(text, Exception):
                            raise text
                        write(picture, text)
                        self.done += 1
                    except FAULTS as error:
                        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                            raise  # nor would the next be written
                        failed += 1
                        progress.clear()
                        fail(picture, reason_of(error, picture))
                self.seconds = time.perf_counter() - started
                progress.show(self.done + failed, f"{failed:,} failed" if failed else "")
        finally:
            prepared.close()
            progress.clear()

    def window(self, batch_size: int) -> int:
        """How many pictures may wait for the model: some batches, but no more than there is room for."""
        return max(2, min(4 * batch_size, ROOM // (self.images * 3 * self.captioner.model.cfg.vit_img_size**2 * 4)))

    def prepared(self, pictures: Iterable[str], ahead: int) -> Iterator[tuple[str, Row | Exception]]:
        """Pictures in order, each with what the model is to read or why it cannot, so many ahead of who asks."""
        pool = ThreadPoolExecutor(WORKERS)
        waiting: deque[tuple[str, Future]] = deque()
        pictures = iter(pictures)
        try:
            while True:
                for picture in islice(pictures, ahead - len(waiting)):
                    waiting.append((picture, pool.submit(self.prepare, picture)))
                if not waiting:
                    return
                picture, future = waiting.popleft()
                yield picture, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def prepare(self, picture: str) -> Row | Exception:
        try:
            if os.path.exists(picture) and not os.path.isfile(picture):
                raise PictureError("not a file")  # to open a pipe may take forever
            row = self.captioner.prepare(picture, self.prompt)
            self.captioner.model.check_room(len(row[0]), self.options["max_new_tokens"])
            return row
        except FAULTS as error:
            return error

    def answers(self, batch: Sequence[tuple[str, Row | Exception]]) -> list[tuple[str, str | Exception]]:
        """Each picture with its answer, or why there is none."""
        rows = [row for _, row in batch if not isinstance(row, Exception)]
        started = time.perf_counter()
        texts = iter(self.say(rows) if rows else [])
        self.busy += time.perf_counter() - started
        return [(picture, row if isinstance(row, Exception) else next(texts)) for picture, row in batch]

    def say(self, rows: list[Row]) -> list[str | Exception]:
        """The answers to a batch; one too large for the memory, or with a row that fails, is halved until it works."""
        try:
            return self.captioner.answers(rows, **self.options)
        except FAULTS as error:
            if len(rows) == 1:
                return [error]
        middle = len(rows) // 2
        return self.say(rows[:middle]) + self.say(rows[middle:])

    def summary(self) -> str:
        return f"{self.done:,} captioned in {self.seconds:.0f} s ({60 * self.done / self.seconds:,.0f} a minute)"


def batches(
    prepared: Iterator[tuple[str, Row | Exception]], size: int, window: int
) -> Iterator[list[tuple[str, Row | Exception]]]:
    """So many at a time, those of a window sorted by length."""
    while part := list(islice(prepared, window)):
        part.sort(key=lambda entry: 0 if isinstance(entry[1], Exception) else len(entry[1][0]))
        yield from (part[start : start + size] for start in range(0, len(part), size))


def reason_of(error: Exception, picture: str) -> str:
    """Why a picture has no caption, without its name."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or "not enough memory"
    return " ".join(text.split()).removeprefix(f"{printable(picture)}: ")
