"""What kind of data lies at a path."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from nanovlm.data.folders import captioned, from_json, imagefolder, pictures_in
from nanovlm.data.hf_datasets import rows
from nanovlm.data.source import EXTENSIONS, ReadOptions, Source, Stream
from nanovlm.data.webdataset import tars
from nanovlm.errors import DataError

KINDS = (
    "pictures with a .txt beside each, metadata.jsonl, .csv or .parquet with a file_name, a .json or .jsonl of "
    "conversations, messages or COCO's captions, .parquet or .arrow files, .tar shards, or a Hub data set owner/name"
)


def open_source(
    path: str, reading: ReadOptions, generators: Mapping[str, Callable[[], Source]] = MappingProxyType({})
) -> Source | Stream:
    """The examples at a path; a DataError says what was found instead.

    generators are sources without files, by the name that stands for a path; a file of that name goes first.
    """
    if not os.path.exists(path):
        if path in generators:
            return generators[path]()
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.,() -]+)?", path):
            return rows(path, reading)
        raise DataError(f"{path}: no such file or folder; data is {KINDS}")
    place = Path(path)
    if place.is_dir():
        return _folder(path, place, reading)
    suffix = place.suffix.lower()
    if suffix in (".json", ".jsonl"):
        return from_json(place, reading)
    if suffix == ".tar":
        return tars(path, [path], reading)
    if suffix == ".csv" or (suffix == ".parquet" and place.stem == "metadata"):
        return imagefolder(str(place.parent), [place], reading)
    if suffix in (".parquet", ".arrow"):
        return rows(path, reading, [path])
    if suffix in EXTENSIONS:
        raise DataError(f"{path} is one picture; name the folder in which it lies, with its .txt beside it")
    raise DataError(f"{path} is not known by its name; data is {KINDS}")


def _folder(path: str, place: Path, reading: ReadOptions) -> Source | Stream:
    if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
        return rows(path, reading)
    tables = sorted(table for kind in ("jsonl", "csv", "parquet") for table in place.rglob(f"metadata.{kind}"))
    if tables:
        return imagefolder(path, tables, reading)
    pictures = pictures_in(place)
    if any(Path(place, picture).with_suffix(".txt").is_file() for picture in pictures):
        return captioned(path, pictures, reading)
    found = {
        kind: sorted(str(file) for file in place.rglob(f"*.{kind}") if file.is_file())
        for kind in ("tar", "parquet", "arrow")
    }
    found["json"] = sorted(str(file) for file in place.iterdir() if file.suffix in (".json", ".jsonl"))
    if found["tar"]:
        return tars(path, found["tar"], reading)
    if files := found["parquet"] or found["arrow"]:
        return rows(path, reading, files)
    if len(found["json"]) == 1:
        return from_json(Path(found["json"][0]), reading)
    if found["json"]:
        raise DataError(f"{path} holds {len(found['json'])} .json files; name the one to read: {found['json'][0]}")
    if pictures:
        return captioned(path, pictures, reading)  # which says that captions are missing
    raise DataError(f"no pictures found in {path}; data is {KINDS}")
