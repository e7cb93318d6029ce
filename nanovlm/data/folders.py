"""Folders of images, with captions in text files beside them or in a metadata table."""

import csv
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from models.checkpoint import WEIGHTS
from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.formats import applicable_options, clean_text, record_to_example
from nanovlm.data.jsonl import read_jsonl, reading_errors
from nanovlm.data.source import Source, captioned_source
from nanovlm.errors import INSTALL_DATA, DataError, MissingExtraError
from nanovlm.options import ReadOptions


def walk(
    folder: str | Path, on_error: Callable[[OSError], None] | None = None, recursive: bool = True
) -> Iterator[str]:
    """Paths of all files in a folder and its subfolders, relative to it.

    Hidden files and folders are left out, and model folders, which may hold a report.png. Links to folders are
    followed, but no folder is read twice. on_error is called for each folder that may not be read; without it they
    count as empty.
    """
    tops, seen = [os.fspath(folder)], set()
    for top in tops:  # the links come after the folders, so that what both reach has its folder's name
        for current, subfolders, files in os.walk(top, onerror=on_error):
            if (place := os.path.realpath(current)) in seen:
                subfolders.clear()
                continue
            seen.add(place)
            model_folders = {name for name in subfolders if os.path.exists(os.path.join(current, name, WEIGHTS))}
            visible = sorted(name for name in subfolders if name[0] != "." and name not in model_folders)
            subfolders[:] = visible if recursive else []
            tops += filter(os.path.islink, (os.path.join(current, name) for name in subfolders))
            relative = os.path.relpath(current, folder)
            yield from (os.path.normpath(os.path.join(relative, name)) for name in files if name[0] != ".")


def open_captioned_folder(path: str, images: Sequence[str], options: ReadOptions) -> Source:
    """A folder of images, each with a .txt file of the same name beside it."""
    samples = {image.removeprefix(os.path.join(path, "")): image for image in images}
    make_example = partial(_captioned_example, options=options)
    return captioned_source(path, samples, has_caption, ".txt beside them", make_example, options, ["prompt"])


def _captioned_example(image: str, name: str, options: ReadOptions) -> Example:
    try:
        text = Path(image).with_suffix(".txt").read_text(encoding="utf-8-sig")  # Windows writes a byte order mark
    except UnicodeDecodeError as error:
        raise ExampleError(f"{name}: its text is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise ExampleError(f"{name}: its text cannot be read: {error}") from None
    return Example([image], [(options.prompt, clean_text(text))], name)


def has_caption(image: str) -> bool:
    """Whether there is a .txt of the image's name beside it."""
    return Path(image).with_suffix(".txt").is_file()


def open_tables(path: str, tables: Sequence[str], options: ReadOptions) -> Source:
    """Hugging Face's imagefolder: metadata tables whose rows have a file_name, relative to the table, and a text."""
    folder = path if os.path.isdir(path) else str(Path(path).parent)
    return imagefolder_source(folder, {table: read_table(Path(table)) for table in tables}, options)


def imagefolder_source(folder: str, tables: Mapping[str, list[dict[str, Any]]], options: ReadOptions) -> Source:
    """The same of tables that have been read."""
    records: list[dict[str, Any]] = []
    supported: Collection[str] = ()
    for table, rows in tables.items():
        if rows and "file_name" not in rows[0]:
            raise DataError(
                f"{table} has no column 'file_name', only {', '.join(sorted(map(str, rows[0])))}; rename one"
            )
        if rows:
            supported = applicable_options(rows[0], table, options)
        relative = os.path.relpath(Path(table).parent, folder)
        for number, row in enumerate(rows, start=1):
            if not (row.get("file_name") and isinstance(row["file_name"], str)):
                raise DataError(f"{table}, row {number} has no file_name; write it, or remove the row")
            image = os.path.normpath(os.path.join(relative, row["file_name"]))
            records.append({**row, "image": image, "images": None})
    if not records:
        raise DataError(f"no images found in {folder}: {next(iter(tables))} has no rows; write some")
    make_example = partial(record_to_example, root=folder, options=options)
    keys = [record["image"] for record in records]
    return Source(folder, records, make_example, keys, named_by_key=True, supported_options=supported)


def read_table(path: Path) -> Any:
    """The rows of a .csv, .jsonl or .parquet file, or what a .json holds."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path)
    if suffix == ".jsonl":
        return read_jsonl(path)
    if suffix == ".json":
        with reading_errors(path):
            return json.loads(path.read_text(encoding="utf-8-sig"))
    with reading_errors(path), open(path, encoding="utf-8-sig", newline="") as file:
        delimiter = csv_delimiter(file.readline())
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter)
        columns, rows = reader.fieldnames or [], list(reader)
    for column in columns:
        if column and columns.count(column) > 1:  # Excel may write columns without a name
            raise DataError(f"{path} has several columns named {column!r}; rename or remove all but one")
    for number, row in enumerate(rows, start=1):
        if None in row:  # DictReader's key for them
            raise DataError(
                f"{path}, row {number}, has more cells than columns; put quotes around a text that holds {delimiter!r}"
            )
    return rows


def csv_delimiter(header: str) -> str:
    """What separates the cells of a table's first line; Excel writes semicolons in half of Europe."""
    return max(",;\t", key=header.count)


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError(f"{path} needs pyarrow: {INSTALL_DATA}, or write a .jsonl or .csv file") from None
    with reading_errors(path):
        return parquet.read_table(path).to_pylist()
