"""Pictures in folders, with their words beside them or in a file that names them."""

import csv
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from models.checkpoint import WEIGHTS
from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.formats import (
    CHATS,
    columns,
    find_root,
    record_example,
    record_key,
    record_pictures,
    wanted,
    words,
)
from nanovlm.data.jsonl import read_jsonl
from nanovlm.data.source import COLUMNS, EXTENSIONS, EXTRA, ReadOptions, Source
from nanovlm.errors import DataError


def pictures_in(folder: str | Path, unread: Callable[[OSError], None] | None = None) -> list[str]:
    """Paths of all pictures in a folder and the folders in it, relative to it, in one order everywhere.

    Not those of a model's folder, such as its report.png. unread is told of the folders that may not be read; without
    it they count as empty.
    """
    found = []
    for here, folders, names in os.walk(folder, onerror=unread):
        models = {name for name in folders if os.path.exists(os.path.join(here, name, WEIGHTS))}
        folders[:] = sorted(name for name in folders if not (name.startswith(".") or name in models))
        inside = os.path.relpath(here, folder)
        for name in names:
            if os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith("."):
                found.append(os.path.normpath(os.path.join(inside, name)))
    return sorted(found)


def captioned(path: str, pictures: Sequence[str], reading: ReadOptions) -> Source:
    """A folder of pictures, each with a .txt of the same name beside it."""
    silent = [picture for picture in pictures if not _caption(path, picture).is_file()]
    if len(silent) == len(pictures) or (silent and not reading.skip):
        way = ", or leave the pictures out by --on-bad-example skip" if len(silent) < len(pictures) else ""
        raise DataError(
            f"captions missing: {len(silent)} of {len(pictures)} pictures in {path} have no .txt beside them: "
            f"{', '.join(silent[:3])}{' ...' * (len(silent) > 3)}; write them{way}"
        )
    left = [picture for picture in pictures if picture not in set(silent)]
    example = partial(captioned_example, root=path, reading=reading)
    return Source(path, left, example, left, named_by_key=True, obeys=["prompt"])


def captioned_example(picture: str, name: str, root: str, reading: ReadOptions) -> Example:
    try:
        text = _caption(root, picture).read_text(encoding="utf-8-sig")  # Windows' editors put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise ExampleError(f"{_caption(root, picture)} cannot be read: {error}") from None
    return Example([name], [(reading.prompt, words(text))], name)


def _caption(root: str, picture: str) -> Path:
    return Path(root, picture).with_suffix(".txt")


def imagefolder(path: str, tables: Sequence[Path], reading: ReadOptions) -> Source:
    """Hugging Face's imagefolder: metadata files whose rows have a file_name, relative to the file, and a text."""
    records, keys = [], []
    for table in tables:
        rows = read_table(table)
        if rows and "file_name" not in rows[0]:
            raise DataError(f"{table} has no column 'file_name', only {', '.join(sorted(map(str, rows[0])))}")
        inside = os.path.relpath(table.parent, path)
        for number, row in enumerate(rows):
            if number == 0:
                columns(row, str(table), reading)
            if not (row.get("file_name") and isinstance(row["file_name"], str)):
                raise DataError(f"{table}, row {number + 1} has no file_name; write it, or take the row out")
            keys.append(os.path.normpath(os.path.join(inside, row["file_name"])))
            records.append({**row, "image": keys[-1], "images": None})
    if not records:
        raise DataError(f"no pictures found in {path}: {tables[0]} has no rows")
    example = partial(record_example, root=path, reading=reading)
    return Source(path, records, example, keys, named_by_key=True, obeys=COLUMNS)


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a .csv, .jsonl or .parquet file."""
    if path.suffix == ".parquet":
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise DataError(f"{path} needs pyarrow: {EXTRA}, or write metadata.jsonl or metadata.csv") from None
        try:
            return parquet.read_table(path).to_pylist()
        except (ArrowException, OSError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise DataError(f"{path} cannot be read: {reason}; write or download it again") from None
    if path.suffix != ".csv":
        return read_records(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}; write it again, in UTF-8") from None


def read_json(path: Path) -> Any:
    """What a .json file holds, or the list of a .jsonl file's objects."""
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; correct the file, or write or download it again") from None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a .json or .jsonl file."""
    found = read_json(path)
    if not isinstance(found, list):
        raise DataError(f"{path} holds {type(found).__name__}, not a list of examples")
    for i, record in enumerate(found):
        if not isinstance(record, dict):
            raise DataError(f"{path}[{i}] is {type(record).__name__}, not an object")
    return found


def from_json(path: Path, reading: ReadOptions) -> Source:
    """COCO's captions, LLaVA's conversations, chats of messages, or records with an image and columns of text."""
    found = read_json(path)
    if isinstance(found, dict) and {"images", "annotations"} <= found.keys():
        return coco(path, found, reading)
    records = read_records(path)
    if records and "file_name" in records[0]:
        return imagefolder(str(path.parent), [path], reading)
    numbers = [i for i, record in enumerate(records) if wanted(record, reading)]
    records = [records[i] for i in numbers]
    if not records:
        raise DataError(f"no pictures found: {path} has no record{' rated so high' * bool(reading.min_ratings)}")
    known = {*CHATS, "texts"} & records[0].keys()
    if not known and not record_pictures(records[0]):
        raise DataError(
            f"{path} is none of COCO's captions (images, annotations), conversations, messages, texts, or records "
            f"with an image and a text; its records have {', '.join(sorted(records[0]))}"
        )
    if not known:
        columns(records[0], str(path), reading)
    for rating in reading.min_ratings if "texts" in known else ():
        if f"{rating}_ratings" not in records[0]:
            there = ", ".join(sorted(records[0]))
            raise DataError(f"{path} has no column '{rating}_ratings', only {there}")
    named = [record_key(record) for record in records]
    root = find_root(path, [picture for picture in named if picture], reading)
    keys = [picture or str(i) for i, picture in zip(numbers, named)]
    obeys = ["images", *(["min_ratings"] if "texts" in known else () if known else COLUMNS)]
    return Source(
        str(path), records, partial(record_example, root=root, reading=reading), keys, obeys=obeys, numbers=numbers
    )


def coco(path: Path, found: dict[str, Any], reading: ReadOptions) -> Source:
    """COCO's captions: every picture with all that was said about it, each a branch of its own."""
    try:
        files = {image["id"]: str(image["file_name"]) for image in found["images"]}
        said = {id: [] for id in files}
        for annotation in found["annotations"]:
            said[annotation["image_id"]].append(words(annotation["caption"]))
    except KeyError as error:
        raise DataError(f"{path} looks like COCO's captions, but lacks {error}, a key or an image's id") from None
    except TypeError as error:
        raise DataError(f"{path} looks like COCO's captions, but is laid out in another way: {error}") from None
    silent = [files[id] for id, captions in said.items() if not captions]
    if not files:
        raise DataError(f"no pictures found: {path} lists none")
    if len(silent) == len(files) or (silent and not reading.skip):
        raise DataError(
            f"captions missing: {len(silent)} of {len(files)} pictures in {path} have none: {', '.join(silent[:3])}"
            f"{' ...' * (len(silent) > 3)}; add them, or leave the pictures out by --on-bad-example skip"
        )
    records = [(files[id], captions) for id, captions in said.items() if captions]
    keys = [file for file, _ in records]
    root = find_root(path, keys, reading)
    example, root = partial(coco_example, reading=reading), root or str(path.parent)
    return Source(root, records, example, keys, named_by_key=True, obeys=["prompt", "images"])


def coco_example(record: tuple[str, list[str]], name: str, reading: ReadOptions) -> Example:
    return Example([name], [(reading.prompt, caption) for caption in record[1]], name)
