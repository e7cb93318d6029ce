"""Files that a run keeps for itself: a resume log and a list of failures.

The log says which images are done and what their captions replaced, so that a resumed run never overwrites a caption
that somebody else has changed since.
"""

import contextlib
import errno
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoint import atomic_write
from nanovlm.data.jsonl import read_jsonl, repair_jsonl
from nanovlm.errors import UsageError
from nanovlm.processing.image_loading import printable

logger = logging.getLogger(__name__)


def relative(image: str | os.PathLike[str], folder: Path) -> str:
    """The path of an image relative to a folder, with / on every system."""
    return Path(os.path.relpath(image, folder)).as_posix()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file that grows line by line; a last line that a kill left unfinished is cut off."""
    if not path.exists():
        return []
    rows = read_jsonl(path, torn_tail="drop")
    if removed := repair_jsonl(path):  # shown, in case it was edited by hand
        logger.warning("%s: removed its unfinished last line: %s", path, removed.decode(errors="replace"))
    return rows


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line to a .jsonl file by one write, so that a kill leaves a whole line, or one that `read_log` removes."""
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


def write_atomically(path: Path, content: bytes) -> None:
    with atomic_write(path, is_locked=True) as new:
        new.write_bytes(content)


class ResumeLog:
    """The images that a run with these settings has done: a line of settings, then an entry for each image.

    `entries` maps a file name to its fields. An entry is written before the caption and says what the caption
    replaced.
    """

    def __init__(self, path: Path, settings: Mapping[str, str]):
        self.path, self.settings = path, {"settings": dict(settings)}
        rows = read_log(path)
        header = rows.pop(0) if rows else None
        if header and ("settings" not in header or any("file_name" not in row for row in rows)):
            raise UsageError(f"{path} is not the resume log of a run; move it away")
        self.has_header, self.is_of_other_run = header is not None, header not in (None, self.settings)
        self.entries: dict[str, dict[str, Any]] = {row.pop("file_name"): row for row in rows}

    @property
    def unconfirmed(self) -> str | None:
        """The image whose caption was perhaps not written: the last one of a run that did not finish."""
        last = next(reversed(self.entries), None)
        return last if last is not None and self.entries[last] else None

    def add(self, file_name: str, **fields: Any) -> None:
        if not self.has_header:
            self._replace({})
        self.entries[file_name] = fields
        append_row(self.path, {"file_name": file_name, **fields})

    def discard(self, file_name: str) -> None:
        """Remove the entry of an image whose caption was not written."""
        del self.entries[file_name]
        self._replace(self.entries)

    def finish(self) -> None:
        """Remove the log."""
        self.path.unlink(missing_ok=True)
        self.start_over()

    def start_over(self) -> None:
        """Forget the entries; the file stays until the first new entry replaces it."""
        self.entries, self.has_header, self.is_of_other_run = {}, False, False

    def _replace(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        rows = [self.settings, *({"file_name": name, **fields} for name, fields in entries.items())]
        write_atomically(self.path, b"".join(map(json_line, rows)))
        self.has_header = True


class FailureLog:
    """The images of this run that have no caption, and why, in a .jsonl file, if it is given."""

    def __init__(self, path: Path | None):
        self.path = path
        self.count, self.empty, self.is_written = 0, 0, False
        if self.path is not None:
            with contextlib.suppress(OSError):  # the folder may be read-only
                self.path.unlink(missing_ok=True)

    def add(self, image: str, reason: str, is_empty: bool = False) -> None:
        self.count += 1
        self.empty += is_empty
        logger.warning("%s: %s", printable(image), reason)
        if self.path is not None:
            with contextlib.suppress(OSError):  # it was logged, at least
                append_row(self.path, {"file_name": relative(image, self.path.parent), "reason": reason})
                self.is_written = True
