"""Where captions of many images go: standard output, a .jsonl table, or a text file beside each image."""

import errno
import functools
import hashlib
import json
import logging
import os
import re
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from models import files
from nanovlm.errors import UsageError

Row = dict[str, Any]
Name = str | os.PathLike[str]
logger = logging.getLogger(__name__)

EDITED = "edited"  # among the `reasons` of a text that a person wrote or edited
ORIGIN = ("model", "prompt", "prefix", "choices")  # stay with a text that a person edits
MADE = ("text", "finish_reason", *ORIGIN, "probability", "log_probability")
FAILED = "failed: "  # begins the finish_reason of an image without a caption, in hidden tables
REPLACES = "nanovlm_replaces"  # in an appended row until it moves into the row of its image
PARSE = json.JSONDecoder(parse_int=str)  # Python refuses integers of more than 4,300 digits
SPACE = re.compile(r"[ \t\r\n]*")
TORN_NAME = re.compile(r'\{"file_name": "(?:[^"\\]|\\.)*"')
BOM = b"\xef\xbb\xbf"
OF_ONE_FILE = frozenset({  # errors that say nothing about the next image's file
    errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG, errno.ELOOP,
})  # fmt: skip


@functools.lru_cache(100_000)
def image_key(path: Name) -> str:
    """The absolute path, equal for NFC and NFD names; a link to an image is an image of its own."""
    parent, name = os.path.split(os.path.abspath(path))
    return unicodedata.normalize("NFC", os.path.join(real_folder(parent), name))


@functools.lru_cache(10_000)
def real_folder(folder: str) -> str:
    """The folder without links."""
    try:
        return os.path.realpath(folder)
    except ValueError:  # a null character, in a row of a table
        return folder


def relative_name(path: Name, folder: Name) -> str:
    """A path as seen from a folder, with slashes on Windows, too; the whole path if it is on another drive there."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:
        return Path(os.path.abspath(path)).as_posix()


def forget_folders() -> None:
    """Look at links anew, which may have changed since the last run."""
    image_key.cache_clear()
    real_folder.cache_clear()


class Output:
    """JSON lines on standard output; the base of outputs that keep captions."""

    overwrite: bool | str = False  # "all": also what a person wrote or edited
    errors_of_one: frozenset[int] = frozenset()  # numbers of errors that concern one image; any other ends the run
    n_writers = 1  # threads that may call `write`

    def target(self, image: str) -> Path:
        """The file of an image's caption."""
        return Path("standard output")

    @contextmanager
    def opened(self, folders: Sequence[str]) -> Iterator[None]:
        """Lock the output during a run over folders, and read what it holds; OSError if that is not possible."""
        yield

    def refusal(self, image: str) -> str:
        """Why no caption of this image can be written; empty if it can."""
        return ""

    def row(self, image: str) -> Row:
        """Row of an image that has a caption, else an empty one."""
        return {}

    def made(self, image: str) -> Row:
        """The row that an image has, with a text or without."""
        return {}

    def write(self, image: str, row: Row) -> None:
        print(json.dumps({"image": image} | row), flush=True)

    def record(self, image: str) -> "Table | None":
        """The hidden table that knows of an image's failure, if there is one. UsageError if it is no table."""
        return None

    def fail(self, image: str, reason: str, origin: Row) -> None:
        """Remember, where there is a place for it, why an image got no caption."""
        with suppress(OSError, UsageError):  # the run reports the failure itself
            record = self.record(image)
            if record and not self.row(image) and self.failure(image) != reason:
                record.write(image, origin | {"finish_reason": FAILED + reason})

    def failure(self, image: str) -> str:
        """The reason why the last run gave an image no caption, if it is known."""
        record = self.record(image)
        return str(record.made(image).get("finish_reason", "")).partition(FAILED)[2] if record else ""


class Table(Output):
    """Captions in the rows of a .jsonl file, named relative to its folder, as `load_dataset("imagefolder")` reads them.

    It has one row an image; rows of other images and other columns stay, each as it is written. A caption is appended.
    If its image has a row, the appended one says that it replaces that, and moves into it at the end of the run, or at
    the start of the next one after a kill. Failures are kept in a hidden table beside it.

    A hidden table is known to this program only: any later row of an image replaces an earlier one. Its hash_of returns
    the hash of an image's text, or nothing.
    """

    def __init__(self, path: Name, overwrite: bool | str = False, hash_of: Callable[[str], str] | None = None):
        self.path = Path(path)
        self.overwrite = overwrite
        self.hash_of = hash_of
        self.lines: dict[str, bytes] = {}  # by key of the image
        self.rows: dict[str, Row] = {}
        self.n_torn = 0  # bytes of a row at the end that a kill has cut
        self.is_joined = True  # no appended row waits to replace another
        self.is_written = False

    def target(self, image: str) -> Path:
        return self.path

    @functools.cached_property
    def failures(self) -> "Table":
        return hidden_table(self.path.with_name(f".{self.path.name}.failed"), lambda image: "")

    def record(self, image: str) -> "Table":
        return self.failures

    @contextmanager
    def opened(self, folders: Sequence[str]) -> Iterator[None]:
        self.check()
        self.failures.check()
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.append(self.path, b"")  # a table that cannot be written fails before any work
        with files.locked(self.path):
            files.remove_parts(self.path.parent)
            self.tidy()
        with files.locked(self.path):  # of the file that tidy may have put there
            self.read()
            self.is_written = True
            try:
                yield
            except BaseException:
                with suppress(OSError):  # the next run does it
                    self.tidy()
                raise
            else:
                self.tidy()
            finally:
                if is_new and not self.rows:
                    files.remove(self.path)

    def row(self, image: str) -> Row:
        row = self.made(image)
        return row if has_text(row) else {}

    def made(self, image: str) -> Row:
        return self.rows.get(image_key(image), {})

    def write(self, image: str, row: Row) -> None:
        name = relative_name(image, self.path.parent)
        key = image_key(image)
        row = {"file_name": name} | row | {"file_name": name}
        if not self.is_written:
            self.is_written = True
            files.append(self.path, b"")
            self.tidy()
        is_marked = self.hash_of is not None or key in self.rows
        files.append(self.path, json_line(row | {REPLACES: True} if is_marked else row))
        self.is_joined = self.is_joined and not is_marked
        self.rows[key] = row

    def check(self) -> None:
        """UsageError if the table is a link, which might lead out of the folder."""
        if self.path.is_symlink():
            raise UsageError(f"{self.path} is a link; remove it, or name another file")

    def read(self) -> bytes:
        """Read lines and rows; returns the file's bytes. UsageError if it is no table with one row an image."""
        self.lines.clear()
        self.rows.clear()
        self.n_torn = 0
        self.is_joined = True
        data = files.read_bytes(self.path)
        lines = data.removeprefix(BOM).split(b"\n")
        for number, line in enumerate(lines, start=1):
            row = parse_row(line)
            if row is not None:
                self._add(number, line, row)
            elif number == len(lines) and is_torn_row(line):
                self.n_torn = len(line)
            elif line.strip():
                place = f"{self.path}, line {number}"
                raise UsageError(f"{place}, is no row with a file_name; name another file, or move this one")
        return data

    def _add(self, number: int, line: bytes, row: Row) -> None:
        """Take a row; one of ours moves into the row that its image has, or replaces it in a hidden table."""
        image = os.path.join(self.path.parent, row["file_name"])
        key = image_key(image)
        old = self.rows.get(key)
        is_ours = row.pop(REPLACES, None) is True
        if old is not None and not is_ours and not completes(row, old):
            problem = f"line {number}, is one of several rows of {row['file_name']}"
            raise UsageError(f"{self.path}, {problem}; captions have one row an image: name another file by --out")
        if old is not None or is_ours:
            self.is_joined = False
            if self.hash_of is None:
                line = merged(self.lines.get(key, b"{}"), line)
                row = {name: value for name, value in (old or {}).items() if name not in MADE} | row
            elif old and old.get("hash", "") == self.hash_of(image) != row.get("hash", ""):
                return  # a kill, or an error, came between this row and its text
            else:
                line = merged(b"{}", line)
        self.lines[key] = line
        self.rows[key] = row

    def tidy(self) -> None:
        """Cut off a row that was torn by a kill, and move appended rows into the rows that they replace."""
        data = self.read()
        whole = len(data) - self.n_torn
        if self.n_torn:
            torn = data[whole:].decode("utf-8", "replace")
            logger.warning("%s: removed its unfinished last line: %.100s", self.path, torn)
        if not self.is_joined:
            files.replace(self.path, b"".join(line + b"\n" for line in self.lines.values()))
        elif self.n_torn:
            files.truncate(self.path, whole)
        elif data and not data.endswith(b"\n"):
            files.append(self.path, b"\n")


class Sidecars(Output):
    """Captions in text files beside their images, and what made each in a hidden table of its folder.

    A row has the hash of its text. A text that differs from it, or that no row tells of, is a person's: it is kept
    unless overwrite is "all".
    """

    errors_of_one = OF_ONE_FILE
    n_writers = 8  # a drive stores several files in the time of one

    def __init__(self, extension: str = ".txt", overwrite: bool | str = False):
        self.extension = extension if extension.startswith(".") else f".{extension}"
        self.overwrite = overwrite
        self.owners: dict[str, str] = {}  # image by text file
        self.records: dict[str, Table] = {}  # by folder
        self.writing = threading.Lock()  # of records

    def target(self, image: str) -> Path:
        return Path(image).with_suffix(self.extension)

    @contextmanager
    def opened(self, folders: Sequence[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for folder in folders:
                if os.access(folder, os.W_OK):
                    stack.enter_context(files.locked(folder))
            try:
                yield
            finally:
                for record in self.records.values():
                    if not record.is_joined:
                        with suppress(OSError):  # its rows are there; the next run joins them
                            record.tidy()

    def refusal(self, image: str) -> str:
        target = self.target(image)
        key = os.path.splitext(image_key(image))[0] + self.extension
        owner = self.owners.setdefault(key, image)
        if key == image_key(image):
            return "its caption would replace it; rename it, or write a table by --out captions.jsonl"
        if owner != image:
            return f"{target.name} is the caption of {Path(owner).name}; rename one of them"
        if not os.access(target.parent, os.W_OK | os.X_OK):
            return "its folder cannot be written; allow it, or write a table elsewhere by --out captions.jsonl"
        try:
            self.record(image)
            files.check_regular(target)
        except files.FileError as error:
            return "" if error.errno == errno.ENOENT else str(error)
        return ""

    def row(self, image: str) -> Row:
        """The caption that an image has, with what made it; an empty file is none. FileError if it cannot be read."""
        text = self._text(image)
        row = self.made(image)
        if not text:
            return {}
        return row | {"text": text} if text_hash(text) == row.get("hash") else edited(row, text)

    def made(self, image: str) -> Row:
        return self.record(image).made(image)

    def _text(self, image: str) -> str:
        try:
            return files.read_text(self.target(image), errors="replace").strip()
        except files.FileError as error:
            if error.errno == errno.ENOENT:
                return ""
            raise

    def _hash(self, image: str) -> str:
        with suppress(files.FileError):
            return text_hash(self._text(image))
        return ""

    def record(self, image: str) -> "Table":
        """The hidden table of the image's folder. UsageError if it is no table."""
        folder = os.path.dirname(image)
        if folder not in self.records:
            kind = "" if self.extension == ".txt" else self.extension
            self.records[folder] = hidden_table(Path(folder, f".captions{kind}.jsonl"), self._hash)
        return self.records[folder]

    def write(self, image: str, row: Row) -> None:
        """Write a row and then its text: a text without its row would count as a person's."""
        target = self.target(image)
        old = self.row(image)
        if old and not replaces(self.overwrite, old):
            logger.warning("%s was written by somebody else during this run; it is kept", target)
            return
        text = row["text"].encode("utf-8", "backslashreplace").decode()
        made = {name: row[name] for name in MADE[1:] if name in row} | {"hash": text_hash(text)}
        with self.writing:
            record = self.record(image)
            if not record.is_written:
                files.remove_parts(target.parent)
            record.write(image, made)
        files.replace(target, f"{text}\n" if text else "")


def hidden_table(path: Path, hash_of: Callable[[str], str]) -> Table:
    """A hidden table as it is now. UsageError if it is none."""
    table = Table(path, hash_of=hash_of)
    table.check()
    if path.exists():
        table.read()
    return table


def reasons(row: Row) -> list[str]:
    """Why a text ends where it does: stop, length or repetition, and whether a person edited it."""
    return str(row.get("finish_reason") or "").split(", ")


def edited(row: Row, text: str, is_replaced: bool = False) -> Row:
    """The row of a text that a person typed or, if is_replaced, in which one replaced words.

    Replaced words neither finish a text that was cut nor make a label more probable; a typed text is a person's own.
    """
    kept = {name: row[name] for name in (MADE if is_replaced else ORIGIN) if name in row}
    ended = [reason for reason in reasons(row) if reason in ("length", "repetition")] if is_replaced else []
    return kept | {"text": text, "finish_reason": ", ".join([EDITED, *ended])}


def replaces(overwrite: bool | str, row: Row) -> bool:
    """True if an image that has a row with a text is captioned again."""
    return overwrite == "all" or (bool(overwrite) and EDITED not in reasons(row))


def text_hash(text: str) -> str:
    """16 hexadecimal digits for a text, whatever ends its lines; nothing for an empty one."""
    lines = "\n".join(text.strip().splitlines())
    return hashlib.sha256(lines.encode("utf-8", "backslashreplace")).hexdigest()[:16] if lines else ""


def has_text(row: Row) -> bool:
    text = row.get("text")
    return bool(text.strip() if isinstance(text, str) else text)


def completes(row: Row, old: Row) -> bool:
    """True if a row has a caption of ours for an older row without one, of which it loses nothing."""
    is_caption = "finish_reason" in row and has_text(row) and not has_text(old)
    return is_caption and all(row.get(name, old[name]) == old[name] for name in old.keys() - {"file_name", "text"})


def parse_row(line: bytes) -> Row | None:
    """The row of a line; None if it is not a JSON object with a file_name."""
    row = None
    with suppress(ValueError, RecursionError):
        row = PARSE.decode(line.decode())
    return row if isinstance(row, dict) and isinstance(row.get("file_name"), str) else None


def is_torn_row(line: bytes) -> bool:
    """True if a line is the beginning of a row of ours, which a kill or a full disk can leave."""
    text = line.decode("utf-8", "replace")
    try:
        PARSE.decode(text)
        return False
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated") or error.pos > len(text) - len(r"\ud800")
    except RecursionError:
        return False
    name = TORN_NAME.match(text)
    rest, start = (text[name.end() :], ', "text": "') if name else (text, '{"file_name": "')
    return bool(text) and is_cut and (rest.startswith(start) or start.startswith(rest))


def merged(old: bytes, new: bytes) -> bytes:
    """The line of an old row with the columns of a new one; values of other columns stay as they are written."""
    before, after = (members(line.decode()) for line in (old, new))
    kept = {name: value for name, value in before.items() if name in after or name not in MADE}
    values = kept | after | {name: kept[name] for name in ("file_name",) if name in kept}
    values.pop(REPLACES, None)
    pairs = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values.items())
    return f"{{{', '.join(pairs)}}}".encode("utf-8", "backslashreplace")


def members(text: str) -> dict[str, str]:
    """The values of a valid JSON object as they are written, by name: 1e400 and 1.50 stay."""
    values = {}
    end = text.index("{") + 1
    while text[start := _after_space(text, end)] != "}":
        name, end = PARSE.raw_decode(text, _after_space(text, start + (text[start] == ",")))
        start = _after_space(text, _after_space(text, end) + 1)  # after the colon
        _, end = PARSE.raw_decode(text, start)
        values[name] = text[start:end]
    return values


def _after_space(text: str, start: int) -> int:
    match = SPACE.match(text, start)
    return match.end() if match else start


def json_line(row: Row) -> bytes:
    text = json.dumps(row, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")  # \udcff in a file's name is JSON's escape, too
