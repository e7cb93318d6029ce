"""Where captions are written: a text file beside each image, or one .jsonl table.

A caption that exists and is not empty is done, so an interrupted run resumes where it stopped.
"""

import errno
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

from models.checkpoint import atomic_write
from nanovlm.bulk.inputs import real_place
from nanovlm.bulk.options import FAILURES, OutputOptions
from nanovlm.data.jsonl import read_jsonl, repair_jsonl
from nanovlm.errors import UsageError
from nanovlm.processing.image_loading import printable

logger = logging.getLogger(__name__)


class Output:
    """Where the captions of a run go; folder is that of the run's own files."""

    def __init__(self, folder: Path, options: OutputOptions):
        self.folder, self.options = folder, options
        self.overwrites = options.existing == "overwrite"
        self.failures = folder / FAILURES  # which lists the images without a caption

    def target(self, image: str) -> Path:
        """The file that the caption of an image goes into."""
        raise NotImplementedError

    def reject_reason(self, image: str) -> str | None:
        """Why a caption of this image cannot be written, or None."""
        return None

    def is_done(self, image: str) -> bool:
        """Whether an image needs no caption."""
        return False

    def write(self, image: str, caption: str) -> None:
        """Store a caption, so that no interruption loses it."""
        raise NotImplementedError

    def finish(self, images: Sequence[str]) -> None:
        """Complete the run, and sort a table's rows in the order of images."""


def open_output(options: OutputOptions, folder: Path) -> Output:
    """Open the output that options name; folder is where sidecars' own files go."""
    if options.is_stream:
        if sys.stdout is None:
            raise UsageError("captions go to standard output, but it is closed; name a table by --out captions.jsonl")
        return Stream(folder, options)
    if options.table is not None:
        return Table(options.table, options)
    return Sidecars(folder, options)


class Stream(Output):
    """JSON lines on standard output, with the image's name and its text, each as soon as the caption is there."""

    def target(self, image: str) -> Path:
        return Path("standard output")

    def write(self, image: str, caption: str) -> None:
        print(json.dumps({self.options.name_key: image, "text": caption}), flush=True)


class Sidecars(Output):
    """A .txt, or a file with another extension, of the same name beside each image."""

    def __init__(self, folder: Path, options: OutputOptions):
        super().__init__(folder, options)
        self.owners: dict[str, str] = {}  # the image of each .txt

    def target(self, image: str) -> Path:
        return Path(image).with_suffix(self.options.extension)

    def reject_reason(self, image: str) -> str | None:
        target = self.target(image)
        if target == Path(image):
            return "its caption would replace it; rename it, or write a table"
        owner = self.owners.setdefault(real_place(target), image)
        if owner != image:
            return f"{target.name} is the caption of {Path(owner).name}; rename one of them, or write a table"
        if os.path.isdir(target.parent) and not os.access(target.parent, os.W_OK):
            return "its folder is not writable; write a table elsewhere"
        return None

    def is_done(self, image: str) -> bool:
        target = self.target(image)
        return not self.overwrites and target.is_file() and target.stat().st_size > 0

    def write(self, image: str, caption: str) -> None:
        target = self.target(image)
        if self.is_done(image):
            logger.warning("%s was written by somebody else during this run; it is kept", target)
            return
        with atomic_write(target, is_locked=True) as new:
            new.write_bytes(f"{caption}\n".encode())


class Table(Output):
    """One .jsonl file with columns file_name, relative to it, and text; other rows and columns that exist are kept.

    Named metadata.jsonl, it makes the folder a Hugging Face imagefolder. A caption is added as a line; at the end of
    the run it moves to the image's first row, if there was one.
    """

    def __init__(self, path: Path, options: OutputOptions):
        super().__init__(path.parent, options)
        self.failures = path.with_name(f"{path.name}.{FAILURES}")  # others may write tables to the folder, too
        self.path = path
        _check_writable(path)
        done = {_file_name(row) for row in self._read() if row.get("text")}
        self.done = set() if self.overwrites else done
        self.written: dict[str, str] = {}
        if path.exists() and (removed := repair_jsonl(path)):  # shown, in case it was edited by hand
            logger.warning("%s: removed its unfinished last line: %s", path, removed.decode(errors="replace"))

    def target(self, image: str) -> Path:
        return self.path

    def is_done(self, image: str) -> bool:
        return relative(image, self.folder) in self.done

    def write(self, image: str, caption: str) -> None:
        name = relative(image, self.folder)
        append_row(self.path, {"file_name": name, "text": caption, **self.options.fields(caption)})
        self.written[name] = caption

    def finish(self, images: Sequence[str]) -> None:
        """Move captions to their images' rows, and sort the rows of images in the places they have together."""
        before = self._read()  # again, as rows may have been edited during the run
        rows = self._merged(before)
        order = {relative(image, self.folder): i for i, image in enumerate(images)}
        places = [i for i, row in enumerate(rows) if _file_name(row) in order]
        in_order = sorted((rows[i] for i in places), key=lambda row: order[_file_name(row)])
        for place, row in zip(places, in_order):
            rows[place] = row
        if rows != before:
            with atomic_write(self.path, is_locked=True) as new:
                new.write_bytes(b"".join(map(json_line, rows)))

    def _merged(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows with each new caption in its image's first row, unless that got a text meanwhile."""
        merged: list[dict[str, Any]] = []
        first: dict[str, int] = {}  # place of each image's first row
        for row in rows:
            name = _file_name(row)
            place = first.setdefault(name, len(merged))
            has_more = row.keys() - {"file_name", "text", *self.options.columns}
            if place == len(merged) or has_more:
                merged.append(row)
            elif not merged[place].get("text") or (self.overwrites and name in self.written):
                merged[place] = merged[place] | row
            elif (name, row.get("text")) not in self.written.items():
                merged.append(row)
        return merged

    def _read(self) -> list[dict[str, Any]]:
        """The rows. UsageError if they are not those of a table of captions."""
        rows = read_jsonl(self.path, torn_tail="drop") if self.path.exists() else []
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get("file_name"), str):
                raise UsageError(f"{self.path} has rows without a file_name; name another file")
            if not isinstance(row.get("text"), (str, NoneType)):
                raise UsageError(f"{self.path}, row {number}, has a text of another type; name another file")
        return rows


class FailureLog:
    """The images of this run that have no caption, and why, in a .jsonl file, if it is given."""

    def __init__(self, path: Path | None):
        self.path = path
        self.count, self.empty, self.is_written = 0, 0, False
        if self.path is not None:
            with suppress(OSError):  # the folder may be read-only
                self.path.unlink(missing_ok=True)

    def add(self, image: str, reason: str, is_empty: bool = False) -> None:
        self.count += 1
        self.empty += is_empty
        logger.warning("%s: %s", printable(image), reason)
        if self.path is not None:
            with suppress(OSError):  # it was logged, at least
                append_row(self.path, {"file_name": relative(image, self.path.parent), "reason": reason})
                self.is_written = True


def relative(image: str | os.PathLike[str], folder: Path) -> str:
    """The path of an image relative to a folder, with / on every system."""
    return Path(os.path.relpath(image, folder)).as_posix()


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line to a .jsonl file by one write, so that a kill leaves a whole line, or one that is found unfinished."""
    line = json_line(row)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    try:
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(file)


def json_line(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:  # a file name that is not valid Unicode
        return json.dumps(row, default=str).encode() + b"\n"


def _file_name(row: Mapping[str, Any]) -> str:
    return Path(os.path.normpath(row["file_name"])).as_posix()


def _check_writable(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} exists and is not a file; name another")
    if not os.access(path if path.exists() else path.parent, os.W_OK) or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} is not writable; name a file elsewhere")
