"""Folders of images, with captions in text files beside them or in a metadata table."""

import csv
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from models.checkpoint import WEIGHTS
from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.formats import clean_text, find_columns, record_to_example
from nanovlm.data.jsonl import read_jsonl
from nanovlm.data.source import COLUMN_OPTIONS, INSTALL_DATA, ReadOptions, Source, check_captions
from nanovlm.errors import DataError, MissingExtraError
from nanovlm.processing.image_loading import IMAGE_EXTENSIONS, readable_extensions


def list_images(
    folder: str | Path,
    on_error: Callable[[OSError], None] | None = None,
    *,
    recursive: bool = True,
    left_out: Counter[str] | None = None,
) -> list[str]:
    """Paths of all images in a folder and its subfolders, relative to it and sorted.

    Hidden files and folders are left out, and model folders, which may hold a report.png. on_error is called for each
    folder that may not be read; without it they count as empty. left_out counts, by extension, the images that
    cannot be read here.
    """
    images, readable = [], readable_extensions()
    for current, subfolders, files in os.walk(folder, onerror=on_error):
        model_folders = {name for name in subfolders if os.path.exists(os.path.join(current, name, WEIGHTS))}
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in model_folders)
        relative = os.path.relpath(current, folder)
        for name in files:
            extension = os.path.splitext(name)[1].lower()
            if extension in readable and not name.startswith("."):
                images.append(os.path.normpath(os.path.join(relative, name)))
            elif extension in IMAGE_EXTENSIONS and left_out is not None:
                left_out[extension] += 1
        if not recursive:
            break
    return sorted(images)


def open_captioned_folder(path: str, images: Sequence[str], options: ReadOptions) -> Source:
    """A folder of images, each with a .txt file of the same name beside it."""
    uncaptioned = [image for image in images if not _caption_path(path, image).is_file()]
    check_captions(path, "have no .txt beside them", uncaptioned, len(images), options)
    left_out = set(uncaptioned)
    captioned = [image for image in images if image not in left_out]
    make_example = partial(_captioned_example, root=path, prompt=options.prompt)
    return Source(path, captioned, make_example, captioned, named_by_key=True, supported_options=["prompt"])


def _captioned_example(image: str, name: str, root: str, prompt: str) -> Example:
    path = _caption_path(root, image)
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ExampleError(f"{path} cannot be read: {error}") from None
    return Example([name], [(prompt, clean_text(text))], name)


def _caption_path(root: str, image: str) -> Path:
    return Path(root, image).with_suffix(".txt")


def open_imagefolder(path: str, tables: Sequence[Path], options: ReadOptions) -> Source:
    """Hugging Face's imagefolder: metadata tables whose rows have a file_name, relative to the table, and a text."""
    return imagefolder_source(path, {table: read_table(table) for table in tables}, options)


def imagefolder_source(path: str, tables: Mapping[Path, list[dict[str, Any]]], options: ReadOptions) -> Source:
    """The same of tables that have been read."""
    records: list[dict[str, Any]] = []
    keys: list[str] = []
    for table, rows in tables.items():
        if rows and "file_name" not in rows[0]:
            raise DataError(f"{table} has no column 'file_name', only {', '.join(sorted(map(str, rows[0])))}")
        if rows:
            find_columns(rows[0], str(table), options)
        relative = os.path.relpath(table.parent, path)
        for number, row in enumerate(rows, start=1):
            if not (row.get("file_name") and isinstance(row["file_name"], str)):
                raise DataError(f"{table}, row {number} has no file_name; write it, or remove the row")
            keys.append(os.path.normpath(os.path.join(relative, row["file_name"])))
            records.append({**row, "image": keys[-1], "images": None})
    if not records:
        raise DataError(f"no images found in {path}: {next(iter(tables))} has no rows")
    make_example = partial(record_to_example, root=path, options=options)
    return Source(path, records, make_example, keys, named_by_key=True, supported_options=COLUMN_OPTIONS)


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a .csv, .jsonl or .parquet file."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=header.count)  # Excel writes semicolons in half of Europe
            return list(csv.DictReader(file, delimiter=delimiter))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}; write it again, in UTF-8") from None


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MissingExtraError(
            f"{path} needs pyarrow: {INSTALL_DATA}, or write metadata.jsonl or metadata.csv"
        ) from None
    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"{path} cannot be read: {reason}; write or download it again") from None
