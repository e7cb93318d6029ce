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

from models.common import files
from nanovlm.errors import UsageError

Row = dict[str, Any]
Name = str | os.PathLike[str]
logger = logging.getLogger(__name__)

EDITED = "edited"  # among the `reasons` of a text that a person wrote or edited
ORIGIN = ("model", "prompt", "prefix", "choices")  # stay with a text that a person edits
MADE = ("text", "finish_reason", *ORIGIN, "probability", "log_probability")
FAILED = "failed: "  # begins the finish_reason of an image without a caption, in hidden tables
REPLACES = "nanovlm_replaces"  # in an appended row until it moves into the row of its image
TORN_NAME = re.compile(r'\{"file_name": "(?:[^"\\]|\\.)*"')
MAX_DIGITS = 4_300  # of an integer that Python reads
NUMBER = f"number {os.urandom(16).hex()}: "  # before digits that are kept as they are
BOM = b"\xef\xbb\xbf"
OF_ONE_FILE = frozenset({  # errors that say nothing about the next image's file
    errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG, errno.ELOOP,
})  # fmt: skip
PARSE = json.JSONDecoder(parse_int=lambda text: int(text) if len(text) < MAX_DIGITS else text)


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

    def read(self) -> None:
        """Look anew at what others may have changed. UsageError for a file that is no table."""

    @contextmanager
    def opened(self, folders: Sequence[str]) -> Iterator[None]:
        """Lock the output of images in folders, and read what it holds; OSError if that is not possible."""
        yield

    def refusal(self, image: str) -> str:
        """Why no caption of this image can be written; empty if it can."""
        return ""

    def row(self, image: str) -> Row:
        """Row of an image that has a caption, else an empty one."""
        return {}

    def made(self, image: str) -> Row:
        """Columns of an image that has a row, with a text or without."""
        record = self.record(image)
        return record.made(image) if record else {}

    def kept(self, image: str) -> Row:
        """Text and columns of ours, for `write` to put them back as they are."""
        return self.row(image) or {"text": ""} | self.made(image)

    def write(self, image: str, row: Row) -> None:
        print(json.dumps({"image": image} | row), flush=True)

    def record(self, image: str) -> "Log | None":
        """The log that knows of an image's failure, if there is one. UsageError if it is no table."""
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


class Lines:
    """The rows of a .jsonl file, by image, each as it is written until it changes; the base of tables and logs."""

    def __init__(self, path: Name):
        self.path = Path(path)
        self.lines: dict[str, bytes] = {}  # by key of the image
        self.rows: dict[str, Row] = {}
        self.torn = b""  # a row at the end that a kill has cut
        self.is_joined = True  # no row waits to take another's place
        self.has_end = True  # the last line is ended
        self._seen: tuple[int, ...] | None = None  # what `_stamp` was when the file was read

    def made(self, image: str) -> Row:
        return self.rows.get(image_key(image), {})

    def read(self) -> None:
        """Read the file, unless it is as this object left it. UsageError if it is a link, or no table."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = None
        self.lines.clear()
        self.rows.clear()
        self.torn = b""
        self.is_joined = True
        if self.path.is_symlink():  # it might lead out of the folder
            raise UsageError(f"{self.path} is a link; remove it, or name another file")
        lines = files.read_bytes(self.path).removeprefix(BOM).split(b"\n") if stamp else [b""]
        self.has_end = not lines[-1]
        for number, line in enumerate(lines, start=1):
            row = parse_row(line)
            if row is not None:
                self._add(number, line, row)
            elif number == len(lines) and is_torn_row(line):
                self.torn = line
            elif line.strip():
                place = f"{self.path}, line {number}"
                raise UsageError(f"{place}, is no row with a file_name; name another file, or move this one")
        self._seen = stamp

    def _add(self, number: int, line: bytes, row: Row) -> None:
        """Take a row of the file."""
        raise NotImplementedError

    def _stamp(self) -> tuple[int, ...] | None:
        """A value that changes with the file; None if there is no file."""
        with suppress(OSError):
            stat = os.lstat(self.path)
            return stat.st_ino, stat.st_size, stat.st_mtime_ns
        return None

    def append(self, row: Row) -> None:
        if self.torn:
            self.tidy()
        files.append(self.path, json_line(row) if self.has_end else b"\n" + json_line(row))
        self.has_end = True
        self._seen = self._stamp()

    def tidy(self) -> None:
        """Cut off a row that was torn by a kill, and move appended rows into the rows that they replace."""
        self.read()
        if self.torn:
            torn = self.torn.decode("utf-8", "replace")
            logger.warning("%s: removed its unfinished last line: %.100s", self.path, torn)
        self._seen = ()  # on an error the file is not what is known of it
        if self.torn or not self.is_joined:
            files.replace(self.path, b"".join(line + b"\n" for line in self.lines.values()))
            self.has_end = True
        self.torn = b""
        self.is_joined = True
        self._seen = self._stamp()

    def key_and_name(self, image: str) -> tuple[str, Row]:
        return image_key(image), {"file_name": relative_name(image, self.path.parent)}


class Log(Lines):
    """A hidden file with what made the captions of a folder's images, and why some have none. The last row counts.

    hash_of returns the hash of an image's text. If a row has it and a later one has not, the later one does not count:
    a kill, or an error, came between that and its text.
    """

    def __init__(self, path: Path, hash_of: Callable[[str], str] = lambda image: ""):
        super().__init__(path)
        self.hash_of = hash_of
        self.read()

    def _add(self, number: int, line: bytes, row: Row) -> None:
        image = os.path.join(self.path.parent, row["file_name"])
        key = image_key(image)
        old = self.rows.get(key)
        if old is not None:
            self.is_joined = False
            if old.get("hash", "") == self.hash_of(image) != row.get("hash", ""):
                return
        self.lines[key] = line
        self.rows[key] = row

    def write(self, image: str, row: Row) -> None:
        key, name = self.key_and_name(image)
        self.append(name | row)
        self.is_joined = self.is_joined and key not in self.rows
        self.rows[key] = name | row

    def tidy(self) -> None:
        self._seen = ()  # texts are stored after their rows, so rows are judged anew
        super().tidy()


class Table(Lines, Output):
    """Captions in the rows of a .jsonl file, named relative to its folder, as `load_dataset("imagefolder")` reads them.

    It has one row an image; rows of other images and other columns stay, numbers and all. A caption is appended. If its
    image has a row, the appended one says that it replaces that, and moves into it at the end of the run, or at the
    start of the next one after a kill. Failures are kept in a log beside it.
    """

    def __init__(self, path: Name, overwrite: bool | str = False):
        super().__init__(path)
        self.overwrite = overwrite

    def target(self, image: str) -> Path:
        return self.path

    @functools.cached_property
    def failures(self) -> Log:
        return Log(self.path.with_name(f".{self.path.name}.failed"))

    def record(self, image: str) -> Log:
        return self.failures

    @contextmanager
    def opened(self, folders: Sequence[str]) -> Iterator[None]:
        self.read()
        self.failures.read()
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.append(self.path, b"")  # a table that cannot be written fails before any work
        with files.locked(self.path):
            files.remove_parts(self.path.parent)
            self.tidy()
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
        return row if text_of(row) else {}

    def kept(self, image: str) -> Row:
        columns = exact(self.lines.get(image_key(image), b"{}"))
        return {name: value for name, value in columns.items() if name in MADE}

    def write(self, image: str, row: Row) -> None:
        key, name = self.key_and_name(image)
        row = name | row | name
        is_new = key not in self.lines
        self.append(row if is_new else row | {REPLACES: True})
        self.is_joined = self.is_joined and is_new
        self._join(key, json_line(row))

    def _add(self, number: int, line: bytes, row: Row) -> None:
        key = image_key(os.path.join(self.path.parent, row["file_name"]))
        if row.get(REPLACES) is True:
            self.is_joined = False
            self._join(key, line)
        elif key in self.lines:
            problem = f"line {number}, is one of several rows of {row['file_name']}"
            raise UsageError(f"{self.path}, {problem}; captions have one row an image: name another file by --out")
        else:
            self.lines[key] = line
            self.rows[key] = row

    def _join(self, key: str, line: bytes) -> None:
        """Give an image's row the columns of a new one, in which ours that are missing are gone."""
        before, after = exact(self.lines.get(key, b"{}")), exact(line)
        kept = {name: value for name, value in before.items() if name in after or name not in MADE}
        row = kept | after | {name: kept[name] for name in ("file_name",) if name in kept}
        row.pop(REPLACES, None)
        self.lines[key] = json_line(row).rstrip(b"\n")
        self.rows[key] = parse_row(self.lines[key]) or {}


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
        self.records: dict[str, Log] = {}  # by folder
        self.writing = threading.Lock()  # of records

    def target(self, image: str) -> Path:
        return Path(image).with_suffix(self.extension)

    def read(self) -> None:
        for record in self.records.values():
            record.read()

    @contextmanager
    def opened(self, folders: Sequence[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for folder in folders:
                if os.access(folder, os.W_OK):
                    stack.enter_context(files.locked(folder))
                    files.remove_parts(folder)
            self.read()
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

    def record(self, image: str) -> Log:
        """The log of the image's folder. UsageError if it is none."""
        folder = os.path.dirname(image)
        if folder not in self.records:
            kind = "" if self.extension == ".txt" else self.extension
            self.records[folder] = Log(Path(folder, f".captions{kind}.jsonl"), self._hash)
        return self.records[folder]

    def write(self, image: str, row: Row) -> None:
        """Write a row and then its text: a text without its row would count as a person's."""
        target = self.target(image)
        if self.overwrite != "all" and (old := self.row(image)) and not replaces(self.overwrite, old):
            logger.warning("%s was written by somebody else during this run; it is kept", target)
            return
        text = row["text"].encode("utf-8", "backslashreplace").decode()
        made = {name: row[name] for name in MADE[1:] if name in row} | {"hash": text_hash(text)}
        with self.writing:
            self.record(image).write(image, made)
        files.replace(target, f"{text}\n" if text else "")


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


def text_of(row: Row) -> str:
    """The text of a row; that of a number is its digits, and white space is none."""
    text = row.get("text")
    has_text = text.strip() if isinstance(text, str) else text or isinstance(text, (int, float))
    return str(text) if has_text else ""


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


def exact(line: bytes) -> Row:
    """The values of a JSON object, with numbers as `json_line` writes them again: 1e400 and 1.50 stay."""
    return json.loads(line, parse_float=f"{NUMBER}{{}}".format, parse_int=f"{NUMBER}{{}}".format)


def json_line(row: Row) -> bytes:
    text = re.sub(rf'"{NUMBER}([^"]+)"', r"\1", json.dumps(row, ensure_ascii=False))
    return f"{text}\n".encode("utf-8", "backslashreplace")  # \udcff in a file's name is JSON's escape, too
