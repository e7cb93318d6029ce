"""Open the data at a path: by the files that a folder holds, by a file's extension, or by a name on the Hub."""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from models.checkpoint import CONFIG, INDEX, WEIGHTS
from nanovlm.data.folders import has_caption, open_captioned_folder, open_tables, walk
from nanovlm.data.hf_datasets import builder_of, open_dataset
from nanovlm.data.json_files import open_json
from nanovlm.data.source import Source, Stream, first_few
from nanovlm.errors import DataError
from nanovlm.options import ReadOptions
from nanovlm.processing.image_loading import readable_extensions

Reader = Callable[[str, Sequence[str], ReadOptions], Source | Stream]  # reads files, which are the path or below it
READERS: dict[str, Reader] = {".json": open_json, ".jsonl": open_json, ".csv": open_tables}
TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
KINDS = (
    "images with a .txt beside each, metadata.jsonl, .csv or .parquet with a file_name, a .json or .jsonl of "
    "conversations, messages or COCO's captions, .tar, .parquet or .arrow files, or a Hub dataset owner/name"
)
TRAINING = {"train", "training"}
# As the datasets library finds splits in the names of files and folders
SPLITS = re.compile(r"(?<![a-z])(train|training|test|testing|eval|evaluation|val|valid|validation|dev)(?![a-z])")
HUB_DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.,() -]+)?")  # owner/name or owner/name:subset

logger = logging.getLogger(__name__)


def open_source(
    path: str, options: ReadOptions, generators: Mapping[str, Callable[[], Source]] = MappingProxyType({})
) -> Source | Stream:
    """The examples at a path: a folder, a file or a Hub dataset. DataError for anything else.

    generators are sources without files by name, such as {"scenes": scene_source}; an existing path goes first.
    """
    if os.path.isdir(path):
        return _open_folder(path, options)
    if os.path.exists(path) or "://" in path:
        suffix = os.path.splitext(path)[1].lower()
        read = open_tables if os.path.basename(path) in TABLES else READERS.get(suffix)
        if read is None and builder_of(path) is None:
            raise DataError(f"{path} has no known extension; data is {KINDS}")
        return (read or open_dataset)(path, [path], options)
    if path in generators:
        return generators[path]()
    if HUB_DATASET.fullmatch(path):
        return open_dataset(path, [], options)
    raise DataError(f"{path}: no such file or folder; data is {KINDS}")


def _open_folder(path: str, options: ReadOptions) -> Source | Stream:
    folder = Path(path)
    if (folder / CONFIG).is_file() and ((folder / WEIGHTS).is_file() or (folder / INDEX).is_file()):
        raise DataError(f"{path} holds a model, not data; pass it as --model {path}, and name the data")
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return open_dataset(path, [], options)
    by_suffix: dict[str, list[str]] = defaultdict(list)
    for name in sorted(walk(path)):
        suffix = "metadata" if os.path.basename(name) in TABLES else os.path.splitext(name)[1].lower()
        by_suffix[suffix].append(os.path.join(path, name))
    tables = _training_files(path, sorted(by_suffix["metadata"], key=Path))
    shards = {suffix: _training_files(path, by_suffix[suffix]) for suffix in (".tar", ".parquet", ".arrow")}
    images = sorted(image for suffix in readable_extensions() for image in by_suffix[suffix])
    captioned = images if any(map(has_caption, images)) else []
    other_tables = _files_in(path, by_suffix[".csv"])
    json_files = _files_in(path, sorted(by_suffix[".json"] + by_suffix[".jsonl"]))
    kinds: list[tuple[str, Sequence[str], Reader]] = [
        ("metadata tables", tables, open_tables),
        ("images with a .txt beside each", captioned, open_captioned_folder),
        *((f"{len(files)} {suffix} files", files, open_dataset) for suffix, files in shards.items()),
        (", ".join(map(os.path.basename, other_tables)), other_tables, open_tables),
        (", ".join(map(os.path.basename, json_files)), json_files, open_json),
    ]
    # of images alone, the reader reports that captions are missing
    found = [kind for kind in kinds if kind[1]] or [("images", images, open_captioned_folder)]
    (name, files, read), *others = found
    if not files:
        raise DataError(f"no images found in {path}; data is {KINDS}")
    if others:
        remedy = "Give each kind a folder of its own" if tables and captioned else "Name those to add them"
        logger.warning(f"{path}: reading the {name}; not read: {'; '.join(other[0] for other in others)}. {remedy}")
    return read(path, files, options)


def _training_files(folder: str, files: Sequence[str]) -> Sequence[str]:
    """Of files that the names of splits divide, as in a copy of a Hub data set, those of the training split."""
    splits = {file: set(SPLITS.findall(os.path.relpath(file, folder).lower())) for file in files}
    others = [file for file, names in splits.items() if names and not names & TRAINING]
    if not others or not any(names & TRAINING for names in splits.values()):
        return files
    names = first_few([os.path.relpath(file, folder) for file in others])
    logger.warning(f"{folder}: reading the training split; not read: {names}. Name those to add them")
    return [file for file in files if file not in others]


def _files_in(folder: str, files: Sequence[str]) -> list[str]:
    """Those of the files that are not in a subfolder."""
    return [file for file in files if os.path.join(folder, os.path.basename(file)) == file]
