"""Rows of training data: dicts, read from a folder, a table, a .json, or with the `datasets` library.

Three keys are the reader's own: "__folder__", where relative image paths start, "__name__", the row's name in messages,
and "__labels__", which marks rows whose text is the name of their folder.
"""

import csv
import json
import os
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from models.checkpoint import CONFIG, INDEX, WEIGHTS
from nanovlm.data.examples import ExampleError
from nanovlm.data.jsonl import read_jsonl, reading_errors
from nanovlm.data.records import to_example
from nanovlm.errors import INSTALL_DATA, DataError, MissingExtraError, first_line
from nanovlm.options import ReadOptions
from nanovlm.processing.image_loading import readable_extensions

Row = Mapping[str, Any]
TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
BUILDERS = {".tar": "webdataset", ".parquet": "parquet", ".arrow": "arrow"}  # of `datasets`, by a file's extension
KINDS = (
    "images with a .txt beside each, one folder of images per label, metadata.jsonl, .csv or .parquet, a .csv, a .json "
    "or .jsonl of records, chats or COCO's captions, .tar, .parquet or .arrow files, or a Hub data set owner/name"
)
TRAINING = {"train", "training"}
# As the datasets library finds splits in the names of files and folders
SPLITS = re.compile(r"(?<![a-z])(train|training|test|testing|eval|evaluation|val|valid|validation|dev)(?![a-z])")
HUB_DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.,() -]+)?")  # owner/name or owner/name:subset


@dataclass
class Rows:
    """The rows at a path, or the data set that streams them; notes say in a line each what was chosen or left out."""

    path: str
    rows: Sequence[Row] = ()
    stream: Any = None  # an IterableDataset of `datasets`
    notes: list[str] = field(default_factory=list)
    images: str | None = None  # folder of the images, if the rows name files
    listed: Sequence[str] = ()  # the images in it
    reads_json: bool = False  # so that --images has an effect


def open_rows(path: str, options: ReadOptions) -> Rows:
    """Rows of a folder, a file or a Hub data set. DataError for anything else."""
    rows = _open(path, options)
    if rows.images:
        names = filter(_is_image, _training_split(sorted(walk(rows.images)))[0])
        rows.listed = [os.path.join(rows.images, name) for name in names]
    return rows


def _open(path: str, options: ReadOptions) -> Rows:
    if os.path.isdir(path):
        return _open_folder(path, options)
    suffix = os.path.splitext(path.partition("?")[0])[1].lower()
    if "://" in path or os.path.exists(path):
        if "://" not in path and not os.path.isfile(path):
            raise DataError(f"{path} is not a file; name a file or a folder")
        if suffix in (".json", ".jsonl"):
            return _open_json(path, options)
        if suffix in (".csv", ".tsv"):
            return _open_tables(path, [path])
        if suffix in BUILDERS:
            return _open_dataset(path, [path], options)
        raise DataError(f"{path} has no known extension; data is {KINDS}")
    if HUB_DATASET.fullmatch(path):
        return _open_dataset(path, [], options)
    raise DataError(f"{path}: no such file or folder; data is {KINDS}")


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in readable_extensions()


def first_few(names: Sequence[str]) -> str:
    """The first three names, for a message."""
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


# --------------------------------------------------------------------------------------------------- folders


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


def _open_folder(path: str, options: ReadOptions) -> Rows:
    """Read the first of the kinds of data that a folder holds; a note names the others."""
    folder = Path(path)
    if (folder / CONFIG).is_file() and ((folder / WEIGHTS).is_file() or (folder / INDEX).is_file()):
        raise DataError(f"{path} holds a model, not data; pass it as --model {path}, and name the data")
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _open_dataset(path, [], options)
    notes: list[str] = []
    names, others = _training_split(sorted(walk(path)))
    if others:
        notes.append(f"reading the training split; not read: {len(others)} files, {first_few(others)}")
    by_suffix: dict[str, list[str]] = defaultdict(list)
    for name in names:
        is_table = os.path.basename(name) in TABLES
        by_suffix["metadata" if is_table else os.path.splitext(name)[1].lower()].append(os.path.join(path, name))
    images = sorted(image for suffix in readable_extensions() for image in by_suffix[suffix])
    texts = by_suffix[".txt"]
    stems = {os.path.splitext(image)[0] for image in images}
    captioned = any(os.path.splitext(text)[0] in stems for text in texts)
    top = {
        suffix: [file for file in by_suffix[suffix] if os.path.dirname(file) == path.rstrip("/")]
        for suffix in by_suffix
    }
    records = sorted(top.get(".json", []) + top.get(".jsonl", []))
    kinds: list[tuple[str, list[str], Callable[[], Rows]]] = [
        ("metadata tables", by_suffix["metadata"], lambda: _open_metadata(path, by_suffix["metadata"], options)),
        ("images with a .txt beside each", images if captioned else [], lambda: _open_captions(path, images, texts)),
        *(
            (
                f"{len(by_suffix[suffix])} {suffix} files",
                by_suffix[suffix],
                lambda s=suffix: _open_dataset(path, by_suffix[s], options),
            )
            for suffix in BUILDERS
        ),
        ("tables", top.get(".csv", []), lambda: _open_tables(path, top[".csv"])),
        ("records", records, lambda: _open_json(_only(path, records), options)),
        ("images", images, lambda: _open_labels(path, images)),
    ]
    found = [kind for kind in kinds if kind[1]]
    if not found:
        raise DataError(f"no images found in {path}; data is {KINDS}")
    rows = found[0][2]()
    unread = [f"{name} ({first_few([os.path.relpath(file, path) for file in files])})" for name, files, _ in found[1:]]
    unread = [text for text in unread if not text.startswith("images")]
    if unread:
        notes.append(f"reading the {found[0][0]}; not read: {'; '.join(unread)}; name those to add them")
    rows.path, rows.notes = path, notes + rows.notes
    return rows


def _training_split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of files that belong to the training split, and of those that belong to others.

    Folders name splits, and of tables and shards their own names, too; images may be called anything.
    """

    def splits(name: str) -> set[str]:
        is_example = _is_image(name) or name.endswith(".txt")
        return set(SPLITS.findall((os.path.dirname(name) if is_example else name).lower()))

    others = [name for name in names if splits(name) and not splits(name) & TRAINING]
    if not others or not any(splits(name) & TRAINING for name in names):
        return list(names), []
    return [name for name in names if name not in set(others)], others


def _open_captions(path: str, images: Sequence[str], texts: Sequence[str]) -> Rows:
    """Images with a .txt of the same name beside each."""
    by_stem = {os.path.splitext(text)[0]: text for text in texts}
    rows: list[Row] = []
    used: dict[str, str] = {}
    for image in images:
        stem = os.path.splitext(image)[0]
        if stem in used:
            raise DataError(f"{stem}.txt stands beside {used[stem]} and {image}; remove one, or name it otherwise")
        used[stem] = image
        text: Any = Path(by_stem[stem]) if stem in by_stem else None
        rows.append({"image": image, "text": text, "__folder__": "", "__name__": image})
    lost = [text for stem, text in by_stem.items() if stem not in used]
    notes = [f"not read: {len(lost)} texts without an image, the first {lost[0]}"] if lost else []
    return Rows(path, rows, notes=notes, images=path)


def _open_labels(path: str, images: Sequence[str]) -> Rows:
    """Images in one folder per label, whose name is the answer."""
    folders = [Path(os.path.relpath(image, path)).parent.parts for image in images]
    labels = [[name for name in parts if not SPLITS.fullmatch(name.lower())] or list(parts) for parts in folders]
    names = sorted({parts[0] for parts in labels if len(parts) == 1})
    if len(names) < 2 or any(len(parts) != 1 for parts in labels):
        unlabelled = [image for image, parts in zip(images, labels) if len(parts) != 1] or images
        raise DataError(
            f"captions missing: {len(unlabelled)} images in {path} have no text, the first {unlabelled[0]}; write a "
            ".txt beside each, a metadata.csv, or put them into one folder per label"
        )
    rows = [
        {"image": image, "text": parts[0], "__folder__": "", "__name__": image, "__labels__": True}
        for image, parts in zip(images, labels)
    ]
    return Rows(path, rows, notes=[f"the name of its folder is each image's answer: {', '.join(names)}"], images=path)


# ---------------------------------------------------------------------------------------------------- tables


def _open_metadata(path: str, tables: Sequence[str], options: ReadOptions) -> Rows:
    """The metadata tables of Hugging Face's imagefolder, one in a folder."""
    folders = [os.path.dirname(table) for table in tables]
    if twice := [table for table in tables if folders.count(os.path.dirname(table)) > 1]:
        raise DataError(f"{path} holds {' and '.join(twice)}; name the one to read")
    if any(table.endswith(".parquet") for table in tables):
        return _open_dataset(_only(path, tables), [_only(path, tables)], options)
    return _open_tables(path, tables)


def _open_tables(path: str, tables: Sequence[str]) -> Rows:
    rows: list[Row] = []
    for table in tables:
        folder = os.path.dirname(table)
        content = read_jsonl(table) if table.endswith(".jsonl") else read_csv(Path(table))
        rows += [row | {"__folder__": folder, "__name__": f"{table}, row {n}"} for n, row in enumerate(content, 1)]
    if not rows:
        raise DataError(f"no images found: {first_few(list(tables))} has no rows; write some")
    return Rows(path, rows, images=path if os.path.isdir(path) else os.path.dirname(path) or ".")


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Rows of a .csv or .tsv; DataError for one that can be read in two ways."""
    with reading_errors(path), open(path, encoding="utf-8-sig", newline="") as file:
        header = file.readline()
        delimiter = max(",;\t", key=header.count)  # Excel writes semicolons in half of Europe
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
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


def _only(path: str, files: Sequence[str]) -> str:
    if len(files) > 1:
        raise DataError(f"{path} holds {len(files)} such files; name the one to read: {first_few(list(files))}")
    return files[0]


# ------------------------------------------------------------------------------------------------------ json


def _open_json(path: str, options: ReadOptions) -> Rows:
    """The records of a .json or .jsonl file, or COCO's captions."""
    if path.endswith(".jsonl"):
        content: Any = read_jsonl(path)
    else:
        with reading_errors(path):
            content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
        content = _coco(path, content)
    if not isinstance(content, list):
        raise DataError(f"{path} holds {type(content).__name__}, not a list of examples; write [...] around them")
    if not content:
        raise DataError(f"no images found: {path} has no record; name another file")
    if not all(isinstance(record, dict) for record in content):
        raise DataError(f"{path} has records that are no objects; correct it")
    folder = options.images or _image_folder(path, content, options)
    rows = [record | {"__folder__": folder, "__name__": f"{path}[{i}]"} for i, record in enumerate(content)]
    return Rows(path, rows, images=folder or ".", reads_json=True)


def _coco(path: str, content: dict[str, Any]) -> list[dict[str, Any]]:
    """COCO's captions: a record for each image, with all its captions."""
    records: dict[Any, dict[str, Any]] = {}
    try:
        for image in content["images"]:
            if image["id"] in records:
                raise DataError(f"{path} has two images with the id {image['id']!r}; correct it")
            records[image["id"]] = {"file_name": image["file_name"], "captions": []}
        for annotation in content["annotations"]:
            records[annotation["image_id"]]["captions"].append(annotation["caption"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} looks like COCO's captions, but needs {error}, a key or an image's id") from None
    return list(records.values())


def _image_folder(path: str, records: Sequence[Row], options: ReadOptions) -> str:
    """The folder that a JSON file's image paths start from: its own, or the one folder below it that has all."""
    folder, names = Path(path).parent, []
    for record in records:
        with suppress(ExampleError):  # which reading the rows reports
            images = to_example({**record, "__folder__": "", "__name__": ""}, options).images
            names += [image for image in images if isinstance(image, str) and not os.path.isabs(image)]
    if not names or any(os.path.isfile(folder / name) for name in names):
        return str(folder)
    below = {parent for file in walk(folder) for parent in (folder / file).parents if folder in parent.parents}
    complete = sorted(str(sub) for sub in below if all(os.path.isfile(sub / name) for name in names))
    if len(complete) == 1:
        return complete[0]
    problem = f"which {' and '.join(complete)} have" if complete else f"which is not in {folder} or one folder below it"
    raise DataError(f"{path} names the image {names[0]}, {problem}; name the folder of the images with --images FOLDER")


# -------------------------------------------------------------------------------------- the datasets library


def _open_dataset(path: str, files: Sequence[str], options: ReadOptions) -> Rows:
    """The rows of files or, without any, of a folder of `save_to_disk` or a Hub data set owner/name[:subset].

    The split "train" is read, or the only one.
    """
    notes = _check_tars([file for file in files if file.endswith(".tar") and os.path.exists(file)])
    dataset = _load(path, files, options)
    if isinstance(dataset, dict):
        if "train" not in dataset and len(dataset) > 1:
            raise DataError(f"{path} has no split 'train', only {', '.join(dataset)}; save the one you mean by itself")
        others = [name for name in dataset if name != "train"] if "train" in dataset else []
        notes += [f"reading the split train; not read: {', '.join(others)}"] if others else []
        dataset = dataset.get("train", next(iter(dataset.values())))
    dataset = dataset.with_format("arrow")  # images stay bytes, so that a broken one is an error that names its row
    folder = path if os.path.isdir(path) else os.path.dirname(path) if os.path.exists(path) else ""
    if not hasattr(dataset, "data"):  # it is streamed
        return Rows(path, stream=dataset, notes=notes)
    if not len(dataset):
        raise DataError(f"no images found: {path} has no rows; name another")
    return Rows(path, DatasetRows(path, dataset, folder), notes=notes)


class DatasetRows(Sequence[Row]):
    """Rows of a data set in Arrow's format as Python objects; numbers of classes become their names."""

    def __init__(self, path: str, dataset: Any, folder: str):
        self.path, self.dataset, self.folder = path, dataset, folder

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: Any) -> Any:
        return plain_row(self.dataset[i].to_pylist()[0], self.dataset.features, self.folder, f"{self.path}[{i}]")


def plain_row(row: dict[str, Any], features: Any, folder: str, name: str) -> Row:
    """A row of `datasets` with the names of its classes, and a tar's sample as its .txt or the record in its .json."""
    for column, feature in (features or {}).items():
        if hasattr(feature, "int2str") and row.get(column) is not None and row[column] >= 0:
            row[column] = feature.int2str(row[column])
    if "__key__" in row:
        name = f"{name} {row['__key__']}"
        found = row.get("json")
        record: dict[str, Any] = found if isinstance(found, dict) else {}
        files = {column: value for column, value in row.items() if column[0] != "_" and column not in ("txt", "json")}
        row = {**record, **({"text": row["txt"]} if row.get("txt") is not None else {}), "__files__": files}
    return row | {"__folder__": folder, "__name__": name}


def _check_tars(files: Iterable[str]) -> list[str]:
    """Notes on what `datasets` passes over in tars; DataError for two files of one name."""
    notes, samples, unread = [], dict[str, set[str]](), []
    for file in files:
        with reading_errors(file), tarfile.open(file) as tar:
            names = [member.name for member in tar if member.isfile()]
        if twice := [name for name, n in Counter(names).items() if n > 1]:
            raise DataError(f"{file} has two files {twice[0]}; name one otherwise")
        for name in names:
            key, _, kind = os.path.basename(name).partition(".")
            samples.setdefault(f"{file} {os.path.dirname(name)} {key}", set()).add(kind)
            if kind not in set().union(*islice(samples.values(), 5)):
                unread.append(f"{file}: {name}")
        with open(file, "rb") as raw:
            raw.seek(-1024, os.SEEK_END)
            if any(raw.read()):
                notes.append(f"{file} has no end mark: it may have been cut")
    if unread:
        notes.append(f"not read: {len(unread)} files of types that the first five samples lack, the first {unread[0]}")
    return notes


def _load(path: str, files: Sequence[str], options: ReadOptions) -> Any:
    """A Dataset, IterableDataset or a dict of them by split."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"{path} is read with the datasets library: {INSTALL_DATA}") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below, once
    try:
        if files:
            builder = BUILDERS[os.path.splitext(files[0].partition("?")[0])[1].lower()]
            return datasets.load_dataset(builder, data_files=list(files), streaming=options.stream)
        if os.path.isdir(path):
            return datasets.load_from_disk(path)
        name, _, subset = path.partition(":")
        return datasets.load_dataset(name, subset or None, streaming=options.stream)
    except Exception as error:  # the library raises errors of many kinds, from DNS to disk
        is_wrapped = isinstance(error, datasets.exceptions.DatasetGenerationError)
        reason = first_line(error.__cause__ or error if is_wrapped else error)
        hint = "write or download it again" if os.path.exists(path) else "if you are offline, name a local folder"
        raise DataError(f"{path}: the datasets library cannot read it: {reason}; {hint}") from None
