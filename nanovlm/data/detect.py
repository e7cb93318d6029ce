"""Find out what kind of data a path holds."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from nanovlm.data.folders import list_images, open_captioned_folder, open_imagefolder
from nanovlm.data.hf_datasets import open_dataset
from nanovlm.data.json_files import open_json
from nanovlm.data.source import ReadOptions, Source, Stream
from nanovlm.data.webdataset import open_tars
from nanovlm.errors import DataError
from nanovlm.image_processing import readable_extensions

KINDS = (
    "images with a .txt beside each, metadata.jsonl, .csv or .parquet with a file_name, a .json or .jsonl of "
    "conversations, messages or COCO's captions, .parquet or .arrow files, .tar shards, or a Hub dataset owner/name"
)
HUB_DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.,() -]+)?")  # owner/name or owner/name:subset


def open_source(
    path: str, options: ReadOptions, generators: Mapping[str, Callable[[], Source]] = MappingProxyType({})
) -> Source | Stream:
    """The examples at a path: a folder, a file or a Hub dataset. DataError tells what was found instead.

    generators are sources without files by name, such as {"scenes": scene_source}; an existing path goes first.
    """
    if os.path.isdir(path):
        return _open_folder(path, options)
    if os.path.exists(path):
        return _open_file(path, options)
    if path in generators:
        return generators[path]()
    if HUB_DATASET.fullmatch(path):
        return open_dataset(path, options)
    raise DataError(f"{path}: no such file or folder; data is {KINDS}")


def _open_file(path: str, options: ReadOptions) -> Source | Stream:
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix in (".json", ".jsonl"):
        return open_json(file, options)
    if suffix == ".tar":
        return open_tars(path, [path], options)
    if suffix == ".csv" or (suffix == ".parquet" and file.stem == "metadata"):
        return open_imagefolder(str(file.parent), [file], options)
    if suffix in (".parquet", ".arrow"):
        return open_dataset(path, options, [path])
    if suffix in readable_extensions():
        raise DataError(f"{path} is one image; name the folder that holds it and its .txt")
    raise DataError(f"{path} has no known extension; data is {KINDS}")


def _open_folder(path: str, options: ReadOptions) -> Source | Stream:
    folder = Path(path)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return open_dataset(path, options)
    tables = sorted(table for suffix in ("jsonl", "csv", "parquet") for table in folder.rglob(f"metadata.{suffix}"))
    if tables:
        return open_imagefolder(path, tables, options)
    images = list_images(folder)
    if any(Path(folder, image).with_suffix(".txt").is_file() for image in images):
        return open_captioned_folder(path, images, options)
    if tars := _files_below(folder, "tar"):
        return open_tars(path, tars, options)
    if files := _files_below(folder, "parquet") or _files_below(folder, "arrow"):
        return open_dataset(path, options, files)
    json_files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".jsonl"))
    if len(json_files) == 1:
        return open_json(json_files[0], options)
    if json_files:
        raise DataError(f"{path} holds {len(json_files)} .json files; name the one to read: {json_files[0]}")
    if images:
        return open_captioned_folder(path, images, options)  # which reports that captions are missing
    raise DataError(f"no images found in {path}; data is {KINDS}")


def _files_below(folder: Path, suffix: str) -> list[str]:
    return sorted(str(file) for file in folder.rglob(f"*.{suffix}") if file.is_file())
