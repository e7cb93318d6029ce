"""Where the captions of many pictures go: a .txt beside each, or one table. No file is ever half written.

A run that is stopped, however rudely, goes on where it was. A .txt or a line of a .jsonl that is there is done. Where
captions already there change, that alone would not tell what is done, and a .csv or .parquet cannot grow line by line:
then what was found goes into a file NAME.partial first, which vanishes with the run's end.
"""

import contextlib
import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovlm.complaints import UsageError, complain
from nanovlm.images import printable
from nanovlm.sources.files import read_table
from nanovlm.sources.source import EXTRA, SourceError

TABLES = (".jsonl", ".csv", ".parquet")
FAILURES = "failures.jsonl"


def combine(existing: str, old: str, new: str) -> str:
    """What a caption becomes where there is an old one."""
    if existing == "append":
        return f"{old} {new}".strip()
    return f"{new} {old}".strip() if existing == "prepend" else new


def relative(picture: str, folder: Path) -> str:
    """A picture's path from a folder, with / everywhere."""
    return Path(os.path.relpath(picture, folder)).as_posix()


class Rows:
    """The objects of a .jsonl file that grows; the last line, if a killed process left it torn, is cut off."""

    def __init__(self, path: Path):
        self.path, self.found = path, []
        data = path.read_bytes() if path.exists() else b""
        whole, _, last = data.rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n"), start=1):
            if line.strip():
                self.found.append(self.parse(line, number))
        if last.startswith(b"{") and not is_json(last):
            os.truncate(path, len(data) - len(last))
        elif last.strip():
            self.found.append(self.parse(last, data.count(b"\n") + 1))
            with open(path, "ab") as file:
                file.write(b"\n")

    def parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{self.path}, line {number}, cannot be read: {error}; mend it or move it away") from None
        if not isinstance(row, dict):
            raise UsageError(f"{self.path}, line {number}, holds no object; mend it or move it away")
        return row

    def add(self, row: Mapping[str, Any]) -> None:
        with open(self.path, "ab", buffering=0) as file:  # one write: whole, or at worst torn at the file's end
            file.write(json_line(row))
        self.found.append(row)


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def json_line(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a name that is no Unicode text
        return json.dumps(row).encode() + b"\n"


class Partial(Rows):
    """What a run that changes captions has found so far: a line of its settings, then rows."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        super().__init__(path)
        self.settings = {"settings": dict(settings)}
        self.before = self.found[:1]  # the settings of the run that began the file
        self.found = self.found[1:]

    @property
    def of_another_run(self) -> bool:
        return bool(self.before) and self.before != [self.settings]

    def add(self, row: Mapping[str, Any]) -> None:
        if not self.before:
            with open(self.path, "ab", buffering=0) as file:
                file.write(json_line(self.settings))
            self.before = [self.settings]
        super().add(row)

    def end(self) -> None:
        self.path.unlink(missing_ok=True)
        self.before, self.found = [], []


class Sidecars:
    """A .txt of the same name beside each picture; home is where the run's own files lie."""

    def __init__(self, home: Path, existing: str, settings: Mapping[str, Any]):
        self.home, self.existing, self.taken = home, existing, {}
        self.partial = Partial(home / "captions.partial", settings)
        if self.partial.found:  # the last may have been noted, but not yet written
            last = self.partial.found[-1]
            replace(self.target(os.path.join(home, last["file_name"])), last["text"])
        if self.partial.of_another_run or existing == "skip":
            self.partial.end()
        self.changed = {row["file_name"] for row in self.partial.found}

    def target(self, picture: str) -> Path:
        return Path(picture).with_suffix(".txt")

    def refuse(self, picture: str) -> str | None:
        """Why this picture's caption cannot be written, if so."""
        target = self.target(picture)
        first = self.taken.setdefault(os.path.abspath(target), picture)
        if first != picture:
            return f"{target.name} is the caption of {Path(first).name}; rename one of them, or write a table by --out"
        if os.path.isdir(target.parent) and not os.access(target.parent, os.W_OK):
            return "its folder may not be written; write a table elsewhere by --out"
        return None

    def done(self, picture: str) -> bool:
        if self.existing == "skip":
            return self.target(picture).is_file()
        return relative(picture, self.home) in self.changed

    def write(self, picture: str, text: str) -> None:
        target = self.target(picture)
        if self.existing != "skip":
            old = ""
            if self.existing != "overwrite" and target.is_file():
                old = target.read_text(encoding="utf-8-sig").strip()
            text = combine(self.existing, old, text)
            self.partial.add({"file_name": relative(picture, self.home), "text": text})
        replace(target, text)

    def end(self) -> None:
        self.partial.end()


def replace(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    new = path.with_name(f".nanovlm-{os.getpid()}.new")
    try:
        new.write_text(f"{text}\n", encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


class Table:
    """One .jsonl, .csv or .parquet with file_name, relative to it, and text: named metadata, it is an imagefolder.

    Other rows and columns that are there already stay. Of several rows with one file_name the first is meant.
    """

    def __init__(self, path: Path, existing: str, settings: Mapping[str, Any]):
        if path.suffix not in TABLES:
            raise UsageError(f"--out {path} ends in none of {', '.join(TABLES)}, and is not txt")
        if path.suffix == ".parquet":
            try:
                import pyarrow  # noqa: F401 better now than after the work
            except ImportError:
                raise UsageError(f"--out {path} needs pyarrow: {EXTRA}, or end it in .jsonl or .csv") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.home, self.existing = path, path.parent, existing
        self.partial = Partial(path.with_name(f"{path.name}.partial"), settings)
        self.read()
        direct = self.lines is not None and existing == "skip" and all(row.get("text") for row in self.rows.values())
        if self.partial.of_another_run or direct:
            self.end()
            self.read()
        self.log = self.lines if direct else self.partial
        self.finished = {self.named(row) for row in self.partial.found}
        if existing == "skip":
            self.finished |= {name for name, row in self.rows.items() if row.get("text")}

    def read(self) -> None:
        """Take in what the file holds."""
        self.lines = Rows(self.path) if self.path.suffix == ".jsonl" else None
        try:
            self.all = self.lines.found if self.lines else read_table(self.path) if self.path.exists() else []
        except SourceError as error:
            raise UsageError(f"{error}; mend it or move it away") from None
        self.rows = {self.named(row): row for row in reversed(self.all)}

    def named(self, row: Mapping[str, Any]) -> str:
        if not isinstance(row.get("file_name"), str):
            raise UsageError(f"{self.path} has rows without a file_name; name another file by --out")
        return Path(os.path.normpath(row["file_name"])).as_posix()

    def refuse(self, picture: str) -> str | None:
        """Why this picture's caption cannot be written, if so."""
        try:
            picture.encode()
        except UnicodeEncodeError:
            if self.path.suffix != ".jsonl":
                return f"its name is no Unicode text, which a {self.path.suffix} cannot hold; a .jsonl can"
        return None

    def done(self, picture: str) -> bool:
        return relative(picture, self.path.parent) in self.finished

    def write(self, picture: str, text: str) -> None:
        name = relative(picture, self.path.parent)
        old = self.rows.get(name, {}).get("text") or ""
        self.log.add({"file_name": name, "text": combine(self.existing, old, text)})

    def end(self) -> None:
        """Put what was found into the table, which is replaced by the new one in one moment."""
        if self.partial.found:
            for found in self.partial.found:
                row = self.rows.setdefault(found["file_name"], found)
                if row is found:
                    self.all.append(row)
                row["text"] = found["text"]
            new = self.path.with_name(f".nanovlm-{os.getpid()}.new")
            try:
                write_table(new, self.path.suffix, self.all)
                os.replace(new, self.path)
            finally:
                new.unlink(missing_ok=True)
        self.partial.end()


def write_table(path: Path, suffix: str, rows: list[dict[str, Any]]) -> None:
    """Write rows as suffix says, and see them onto the disk."""
    if suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        columns = list(dict.fromkeys(column for row in rows for column in row))
        table = pyarrow.Table.from_pylist([{column: row.get(column) for column in columns} for row in rows])
        parquet.write_table(table, path)
    elif suffix == ".csv":
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_bytes(b"".join(map(json_line, rows)))
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class Failures:
    """The pictures of this run that have no caption, and why: failures.jsonl in the run's home, if there are any."""

    def __init__(self, home: Path):
        self.path, self.count = home / FAILURES, 0
        self.path.unlink(missing_ok=True)

    def add(self, picture: str, reason: str) -> None:
        self.count += 1
        complain(f"{printable(picture)}: {reason}")
        with contextlib.suppress(OSError), open(self.path, "ab", buffering=0) as file:  # it was said, at least
            file.write(json_line({"file_name": relative(picture, self.path.parent), "reason": reason}))
