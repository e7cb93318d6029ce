"""Where captions are written: a .txt beside each image, or one table. Every file is replaced atomically.

An interrupted run resumes where it stopped. With existing="skip", a .txt or a line of a .jsonl that exists is done.
Otherwise a resume log, FILE.run or captions.run (see `ResumeLog`), says which images are done and what their captions
replaced. A caption that differs from what the run has seen is never overwritten, so an edit by hand is kept.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

from nanovlm.bulk.inputs import real_place
from nanovlm.bulk.options import FAILURES, OutputOptions
from nanovlm.bulk.resume_log import ResumeLog, append_row, json_line, read_log, relative, write_atomically
from nanovlm.data.source import first_few
from nanovlm.errors import UsageError

logger = logging.getLogger(__name__)


class Output:
    """Where the captions of a run go; folder is that of the run's own files."""

    log: ResumeLog | None = None

    def __init__(self, folder: Path, options: OutputOptions):
        self.folder, self.options, self.existing = folder, options, options.existing
        self.failures = folder / FAILURES  # which lists the images without a caption

    @property
    def resume_log(self) -> Path | None:
        return None if self.log is None else self.log.path

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

    def finish(self, images: Sequence[str] = (), is_whole: bool = True) -> None:
        """Complete the run, and sort a table's rows in the order of images; is_whole: none is left for a later run."""
        if self.log is not None and is_whole:
            self.log.finish()


def open_output(options: OutputOptions, folder: Path, settings: Mapping[str, str]) -> Output:
    """Open the output that options name; folder is where sidecars' own files go, settings tell runs apart."""
    if options.is_stream:
        if sys.stdout is None:
            raise UsageError("captions go to standard output, but it is closed; name a table by --out captions.jsonl")
        return Stream(folder, options)
    if options.table is not None:
        return Table(options.table, options, settings)
    return Sidecars(folder, options, settings)


class Stream(Output):
    """JSON lines on standard output, with the image's name and its text, each as soon as the caption is there."""

    def target(self, image: str) -> Path:
        return Path("standard output")

    def write(self, image: str, caption: str) -> None:
        print(json.dumps({self.options.name_key: image, "text": caption}), flush=True)


class Sidecars(Output):
    """A .txt, or a file with another extension, of the same name beside each image."""

    def __init__(self, folder: Path, options: OutputOptions, settings: Mapping[str, str]):
        super().__init__(folder, options)
        self.owners: dict[str, str] = {}  # the image of each .txt
        if self.existing != "skip":
            self.log = ResumeLog(folder / "captions.run", settings)
            if self.log.is_of_other_run:
                self.log.start_over()
            self._check_last_entry(self.log)

    def _check_last_entry(self, log: ResumeLog) -> None:
        """Find out whether the last caption was written before a run was killed: its file then changed."""
        if (name := log.unconfirmed) is not None:
            entry, target = log.entries[name], self.target(os.path.join(self.folder, name))
            if entry.get("before") != entry.get("after") and entry.get("before") == _digest(_read_bytes(target)):
                log.discard(name)

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
        is_logged = self.log is None or relative(image, self.folder) in self.log.entries
        return is_logged and self.target(image).is_file()

    def write(self, image: str, caption: str) -> None:
        target = self.target(image)
        old = _read_bytes(target)
        if self.log is None:
            if old is None:
                write_atomically(target, f"{caption}\n".encode())
            else:
                logger.warning("%s was written by somebody else during this run; it is kept", target)
            return
        new = f"{caption}\n".encode()
        name = relative(image, self.folder)
        self.log.add(name, before=_digest(old), after=_digest(new))
        try:
            write_atomically(target, new)
        except Exception:
            with suppress(OSError):  # of a full disk; the next run discards the last entry
                self.log.discard(name)
            raise


class Table(Output):
    """One .jsonl file with columns file_name, relative to it, and text.

    Named metadata.jsonl, it makes the folder a Hugging Face imagefolder. Other rows and columns that exist are kept. Of
    several rows with one file_name the first is used.
    """

    def __init__(self, path: Path, options: OutputOptions, settings: Mapping[str, str]):
        super().__init__(path.parent, options)
        self.failures = path.with_name(f"{path.name}.{FAILURES}")  # others may write tables to the folder, too
        self.path = path
        _check_writable(path)
        self.log: ResumeLog = ResumeLog(path.with_name(f"{path.name}.run"), settings)
        self._read()
        is_skip, has_texts = self.existing == "skip", all(row.get("text") for row in self.rows.values())
        self.appends_lines = is_skip and has_texts
        self.done: set[str] = set()
        if not (self.log.is_of_other_run or self.appends_lines):
            self.done |= {name for name, entry in self.log.entries.items() if entry or name in self.rows}
        else:
            self._merge()
            self.log.finish()
        if is_skip:
            self.done |= {name for name, row in self.rows.items() if row.get("text")}

    def target(self, image: str) -> Path:
        return self.path

    def is_done(self, image: str) -> bool:
        return relative(image, self.folder) in self.done

    def write(self, image: str, caption: str) -> None:
        name = relative(image, self.folder)
        if self.appends_lines:
            append_row(self.path, {"file_name": name, "text": caption, **self.options.fields(caption)})
        else:
            self.log.add(name, before=_text(self.rows.get(name, {})), text=caption)

    def finish(self, images: Sequence[str] = (), is_whole: bool = True) -> None:
        if self.appends_lines:
            self._read()
            self._replace_sorted(images)
            return
        self._merge(images)
        super().finish(images, is_whole)

    def _read(self) -> None:
        """Read the rows. UsageError if they are not those of a table of captions."""
        self.all_rows = read_log(self.path)
        for number, row in enumerate(self.all_rows, start=1):
            if not isinstance(row.get("file_name"), str):
                raise UsageError(f"{self.path} has rows without a file_name; name another file")
            if not isinstance(row.get("text"), (str, NoneType)):
                raise UsageError(f"{self.path}, row {number}, has a text of another type; name another file")
        self.rows = {_file_name(row): row for row in reversed(self.all_rows)}

    def _merge(self, images: Sequence[str] = ()) -> None:
        """Move captions from the resume log into the table, except where a row has changed since, and sort its rows.

        The table is read again: a row may have been edited during the run. Merging twice changes nothing, so the run
        may be killed anywhere in between.
        """
        pending = {name: entry for name, entry in self.log.entries.items() if entry}
        if not pending:
            return
        self._read()
        changed = []
        for name, entry in pending.items():
            row = self.rows.get(name)
            if row is None:
                self.rows[name] = {"file_name": name, "text": entry["text"], **self.options.fields(entry["text"])}
                self.all_rows.append(self.rows[name])
            elif _text(row) == entry.get("before", ""):
                row |= {"text": entry["text"], **self.options.fields(entry["text"])}
            elif _text(row) != entry["text"]:
                changed.append(name)
        if changed:
            logger.warning("%s: kept %d texts that changed meanwhile: %s", self.path, len(changed), first_few(changed))
        self._replace_sorted(images, has_changed=True)

    def _replace_sorted(self, images: Sequence[str], has_changed: bool = False) -> None:
        """Write all rows, those of images in their order, in the places that these rows have together."""
        order = {relative(image, self.folder): i for i, image in enumerate(images)}
        names = [_file_name(row) for row in self.all_rows]
        places = [i for i, name in enumerate(names) if name in order]
        origins = sorted(places, key=lambda i: order[names[i]])
        if not has_changed and origins == places:
            return
        rows = list(self.all_rows)
        for place, origin in zip(places, origins):
            rows[place] = self.all_rows[origin]
        write_atomically(self.path, b"".join(map(json_line, rows)))


def _read_bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _digest(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _file_name(row: Mapping[str, Any]) -> str:
    return Path(os.path.normpath(row["file_name"])).as_posix()


def _text(row: Mapping[str, Any]) -> str:
    return row.get("text") or ""


def _check_writable(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} exists and is not a file; name another")
    if not os.access(path if path.exists() else path.parent, os.W_OK) or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} is not writable; name a file elsewhere")
