"""Where the captions of many pictures go: a .txt beside each, or one table. No file is ever half written.

A run that is stopped, however rudely, goes on where it was. A .txt or a line of a .jsonl that is there is done. Where
captions already there change, that alone would not tell what is done, and a .csv or .parquet cannot grow line by line:
then what was found goes into a file NAME.run first. It vanishes with the run's end, but for one that has appended or
prepended: of that it keeps the names, lest the same command, repeated, add the same words once more.
"""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from nanovlm.bulk.resume_log import JsonlLog, ResumeLog, atomic_write, json_line, relative
from nanovlm.data.folders import read_table
from nanovlm.data.source import INSTALL_DATA
from nanovlm.errors import DataError, UsageError

TABLES = (".jsonl", ".csv", ".parquet")
ADDS = ("append", "prepend")


def combine(existing: str, old: str, new: str) -> str:
    """What a caption becomes where there is an old one."""
    if existing == "append":
        return f"{old} {new}".strip()
    return f"{new} {old}".strip() if existing == "prepend" else new


class Sidecars:
    """A .txt of the same name beside each picture; home is where the run's own files lie."""

    def __init__(self, home: Path, existing: str, settings: Mapping[str, Any]):
        self.home, self.existing, self.taken = home, existing, {}
        self.record = ResumeLog(home / "captions.run", settings)
        for name, text in list(self.record.texts.items())[-1:]:  # noted, but maybe not yet written
            write_text(self.target(os.path.join(home, name)), text)
        if self.record.of_another_run or existing == "skip":
            self.record.forget()
        self.changed = {row["file_name"] for row in self.record.found}

    def target(self, picture: str) -> Path:
        return Path(picture).with_suffix(".txt")

    def refuse(self, picture: str) -> str | None:
        """Why this picture's caption cannot be written, if so."""
        target = self.target(picture)
        if target == Path(picture):
            return "its caption would take its place; rename it, or write a table by --out"
        first = self.taken.setdefault(os.path.abspath(target), picture)
        if first != picture:
            return f"{target.name} is the caption of {Path(first).name}; rename one of them, or write a table by --out"
        if os.path.isdir(target.parent) and not os.access(target.parent, os.W_OK):
            return "its folder may not be written; write a table elsewhere by --out"
        return None

    def done(self, picture: str) -> bool:
        there = self.target(picture).is_file()
        return there and (self.existing == "skip" or relative(picture, self.home) in self.changed)

    def write(self, picture: str, text: str) -> None:
        target = self.target(picture)
        if self.existing != "skip":
            old = ""
            if self.existing in ADDS and target.is_file():
                try:
                    old = target.read_text(encoding="utf-8-sig").strip()
                except UnicodeDecodeError:
                    raise ValueError(f"{target.name} is no UTF-8 text; mend it or move it away") from None
            text = combine(self.existing, old, text)
            self.record.add({"file_name": relative(picture, self.home), "text": text})
        write_text(target, text)

    def end(self) -> None:
        self.record.end() if self.existing in ADDS else self.record.forget()


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as new:
        new.write_text(f"{text}\n", encoding="utf-8")


def check_table(path: Path) -> None:
    """Refuse a table that could not be written, before the work."""
    if path.suffix not in TABLES:
        raise UsageError(f"--out {path} ends in none of {', '.join(TABLES)}, and is not txt")
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise UsageError(f"--out {path} needs pyarrow: {INSTALL_DATA}, or end it in .jsonl or .csv") from None


class Table:
    """One .jsonl, .csv or .parquet with file_name, relative to it, and text: named metadata, it is an imagefolder.

    Other rows and columns that are there already stay. Of several rows with one file_name the first is meant.
    """

    def __init__(self, path: Path, existing: str, settings: Mapping[str, Any]):
        self.path, self.home, self.existing = path, path.parent, existing
        if path.exists() and not path.is_file():
            raise UsageError(f"--out {path} is there and no file; name another")
        if not os.access(path if path.exists() else self.home, os.W_OK) or not os.access(self.home, os.W_OK):
            raise UsageError(f"--out {path} may not be written; name a file elsewhere")
        self.record = ResumeLog(path.with_name(f"{path.name}.run"), settings)
        self.read()
        direct = self.lines is not None and existing == "skip" and all(row.get("text") for row in self.rows.values())
        if self.record.of_another_run or direct:
            self.merge()
            self.record.forget()
            self.read()
        self.log = self.lines if direct else self.record
        self.finished = set(self.record.texts) | {
            name for name, row in self.rows.items() if existing == "skip" and row.get("text")
        }
        self.finished |= self.rows.keys() & {row["file_name"] for row in self.record.found}

    def read(self) -> None:
        """Take in what the file holds."""
        self.lines = JsonlLog(self.path) if self.path.suffix == ".jsonl" else None
        try:
            self.all = self.lines.found if self.lines else read_table(self.path) if self.path.exists() else []
        except DataError as error:
            raise UsageError(f"{error}; mend it or move it away") from None
        self.rows = {self.named(row): row for row in reversed(self.all)}
        for number, row in enumerate(self.all, start=1):
            if None in row:  # csv.DictReader's name for what stands behind the last column
                raise UsageError(f"{self.path}, row {number}, has more cells than columns; mend it or move it away")
            if not isinstance(row.get("text"), (str, NoneType)):
                raise UsageError(f"{self.path}, row {number}, has a text that is no text; name another file by --out")

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
        return relative(picture, self.home) in self.finished

    def write(self, picture: str, text: str) -> None:
        name = relative(picture, self.home)
        old = self.rows.get(name, {}).get("text") or ""
        self.log.add({"file_name": name, "text": combine(self.existing, old, text)})

    def end(self) -> None:
        self.merge()
        self.record.end() if self.existing in ADDS else self.record.forget()

    def merge(self) -> None:
        """Put what was found into the table, which is replaced by the new one in one moment."""
        for name, text in (texts := self.record.texts).items():
            if name not in self.rows:
                self.rows[name] = {"file_name": name}
                self.all.append(self.rows[name])
            self.rows[name]["text"] = text
        if texts:
            with atomic_write(self.path) as new:
                write_table(new, self.path.suffix, self.all)


def write_table(path: Path, suffix: str, rows: list[dict[str, Any]]) -> None:
    """Write rows as suffix says, and see them onto the disk."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.Table.from_pylist([{column: row.get(column) for column in columns} for row in rows])
        parquet.write_table(table, path)
    elif suffix == ".csv":
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_bytes(b"".join(map(json_line, rows)))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
