"""Find out what kind of data a path holds."""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from models.checkpoint import CONFIG, INDEX, WEIGHTS
from nanovlm.data.folders import list_images, open_captioned_folder, open_imagefolder
from nanovlm.data.hf_datasets import open_dataset
from nanovlm.data.json_files import open_json
from nanovlm.data.remote import list_files
from nanovlm.data.source import ReadOptions, Source, Stream
from nanovlm.data.webdataset import open_remote_tars, open_tars
from nanovlm.errors import DataError
from nanovlm.processing.image_loading import readable_extensions

KINDS = (
    "images with a .txt beside each, metadata.jsonl, .csv or .parquet with a file_name, a .json or .jsonl of "
    "conversations, messages or COCO's captions, .parquet or .arrow files, .tar shards, or a Hub dataset owner/name"
)
REMOTE = re.compile(r"[a-z0-9]+://.+\.(parquet|arrow|tar)(\?.*)?")  # what fsspec opens: hf://, s3://, https://
HUB_DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.,() -]+)?")  # owner/name or owner/name:subset

logger = logging.getLogger(__name__)


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
    if match := REMOTE.fullmatch(path):
        return open_remote_tars(path, options) if match[1] == "tar" else open_dataset(path, options, list_files(path))
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
    if suffix == ".safetensors":
        raise DataError(f"{path} holds a model's weights, not data; pass its folder as --model, and name the data")
    if suffix in readable_extensions():
        raise DataError(f"{path} is one image; name the folder that holds it and its .txt")
    raise DataError(f"{path} has no known extension; data is {KINDS}")


def _open_folder(path: str, options: ReadOptions) -> Source | Stream:
    folder = Path(path)
    if (folder / CONFIG).is_file() and ((folder / WEIGHTS).is_file() or (folder / INDEX).is_file()):
        raise DataError(f"{path} holds a model, not data; pass it as --model {path}, and name the data")
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return open_dataset(path, options)
    tables = sorted(table for suffix in ("jsonl", "csv", "parquet") for table in folder.rglob(f"metadata.{suffix}"))
    images = list_images(folder)
    captioned = any(Path(folder, image).with_suffix(".txt").is_file() for image in images)
    json_files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".jsonl") and file not in tables)
    other_tables = sorted(file for file in folder.glob("*.csv") if file not in tables)
    tars, shards = _files_below(folder, "tar"), _files_below(folder, "parquet") or _files_below(folder, "arrow")
    shards = [shard for shard in shards if Path(shard) not in tables]
    kinds: list[tuple[bool, str, Callable[[], Source | Stream]]] = [
        (bool(tables), "metadata tables", lambda: open_imagefolder(path, tables, options)),
        (captioned, "images with a .txt beside each", lambda: open_captioned_folder(path, images, options)),
        (bool(tars), f"{len(tars)} .tar shards", lambda: open_tars(path, tars, options)),
        (bool(shards), f"{len(shards)} .parquet or .arrow files", lambda: open_dataset(path, options, shards)),
        (bool(other_tables), _names(other_tables), lambda: open_imagefolder(path, other_tables, options)),
        (bool(json_files), _names(json_files), lambda: _open_only(json_files, options)),
    ]
    found = [(name, open_kind) for present, name, open_kind in kinds if present]
    if found:
        if others := [name for name, _ in found[1:]]:
            remedy = "Give each kind a folder of its own" if tables and captioned else "Name those to add them"
            logger.warning(f"{path}: reading the {found[0][0]}; not read: {'; '.join(others)}. {remedy}")
        return found[0][1]()
    if images:
        return open_captioned_folder(path, images, options)  # which reports that captions are missing
    raise DataError(f"no images found in {path}; data is {KINDS}")


def _names(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files)


def _open_only(json_files: Sequence[Path], options: ReadOptions) -> Source:
    if len(json_files) > 1:
        folder = json_files[0].parent
        raise DataError(f"{folder} holds {len(json_files)} .json files; name the one to read: {json_files[0]}")
    return open_json(json_files[0], options)


def _files_below(folder: Path, suffix: str) -> list[str]:
    return sorted(str(file) for file in folder.rglob(f"*.{suffix}") if file.is_file())
