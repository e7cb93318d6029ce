"""`open_source`: what a folder, a file or a Hub data set holds, as examples."""

import csv
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from models.checkpoint import CONFIG, INDEX, WEIGHTS
from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.records import FOLDER_NAME, Row, plain_row, to_example
from nanovlm.data.source import Source, Stream
from nanovlm.errors import INSTALL_DATA, DataError, MissingExtraError, first_line
from nanovlm.options import ReadOptions
from nanovlm.processing.image_loading import readable_extensions

TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")  # of Hugging Face's imagefolder, one in a folder
BUILDERS = {".tar": "webdataset", ".parquet": "parquet", ".arrow": "arrow"}  # of `datasets`, by a file's extension
KINDS = (
    "images with a .txt beside each, one folder of images per label, metadata.jsonl, .csv or .parquet, a .csv, a .json "
    "or .jsonl of records, chats or COCO's captions, .tar, .parquet or .arrow files, or a Hub data set owner/name"
)
TRAINING = {"train", "training"}
# As the datasets library finds splits in the names of files and folders
SPLITS = re.compile(r"(?<![a-z])(train|training|test|testing|eval|evaluation|val|valid|validation|dev)(?![a-z])")
HUB_DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.,() -]+)?")  # owner/name or owner/name:subset
Reader = Callable[[str, list[str], ReadOptions], Source]  # of the files at a path


def open_source(path: str, options: ReadOptions, check: bool = False) -> Source:
    """The examples at a path; see `Source.scan`. DataError for what cannot be read."""
    if path == "scenes" and not os.path.exists(path):
        from nanovlm.synthetic.recipe import scene_source  # here: other data do without the drawer

        return scene_source()
    source = _open(path, options)
    if source.folder and not source.listed:
        names = _training_split(sorted(walk(source.folder)))[0]
        source.listed = [os.path.join(source.folder, name) for name in names if _is_image(name)]
    source.scan(options, check)
    return source


def _open(path: str, options: ReadOptions) -> Source:
    if os.path.isdir(path):
        return _open_folder(path, options)
    if "://" in path or os.path.exists(path):
        if "://" not in path and not os.path.isfile(path):
            raise DataError(f"{path} is not a file; name a file or a folder")
        kind = suffix(path.partition("?")[0])
        if kind in BUILDERS:
            return _read_dataset(path, [path], options)
        if kind in PARSERS:
            return _read_records(path, [path], options)
        raise DataError(f"{path} has no known extension; data is {KINDS}")
    if HUB_DATASET.fullmatch(path):
        return _read_dataset(path, [], options)
    raise DataError(f"{path}: no such file or folder; data is {KINDS}")


def suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_image(name: str) -> bool:
    return suffix(name) in readable_extensions()


# --------------------------------------------------------------------------------------------------- folders


def walk(folder: str | Path) -> Iterator[str]:
    """Paths of all files in a folder and its subfolders, relative to it.

    Hidden files and folders are left out, and model folders, which may hold a report.png. Links to folders are
    followed, but no folder is read twice.
    """
    tops, seen = [os.fspath(folder)], set()
    for top in tops:  # the links come after the folders, so that what both reach has its folder's name
        for current, subfolders, files in os.walk(top):
            place = os.path.realpath(current)
            paths = {name: os.path.join(current, name) for name in sorted(subfolders) if name[0] != "."}
            models = {name for name, sub in paths.items() if os.path.exists(os.path.join(sub, WEIGHTS))}
            subfolders[:] = [] if place in seen else [name for name in paths if name not in models]
            tops += [paths[name] for name in subfolders if os.path.islink(paths[name])]
            if place not in seen:
                yield from (os.path.relpath(os.path.join(current, name), folder) for name in files if name[0] != ".")
            seen.add(place)


def _open_folder(path: str, options: ReadOptions) -> Source:
    """Read the first of the kinds of data that a folder holds; the scan names the other files."""
    folder = Path(path)
    if (folder / CONFIG).is_file() and ((folder / WEIGHTS).is_file() or (folder / INDEX).is_file()):
        raise DataError(f"{path} holds a model, not data; pass it as --model {path}, and name the data")
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _read_dataset(path, [], options)
    names, others = _training_split(sorted(walk(path)))
    tables = [name for name in names if os.path.basename(name) in TABLES]
    images = [name for name in names if _is_image(name)]
    texts = [name for name in names if suffix(name) == ".txt"]
    has_text = {os.path.splitext(name)[0] for name in texts} & {os.path.splitext(name)[0] for name in images}
    top = [name for name in names if os.path.dirname(name) == ""]
    kinds: list[tuple[list[str], Reader]] = [
        (tables, _read_records),
        (images + texts if has_text else [], _read_captions),
        *(([name for name in names if suffix(name) == kind], _read_dataset) for kind in BUILDERS),
        ([name for name in top if suffix(name) in (".csv", ".tsv")], _read_records),
        ([name for name in top if suffix(name) in (".json", ".jsonl")], _read_records),
        (images, _read_labels),
    ]
    files, reader = next((kind for kind in kinds if kind[0]), ([], None))
    if reader is None:
        raise DataError(f"no images found in {path}; data is {KINDS}")
    source = reader(path, [os.path.join(path, name) for name in files], options)
    source.listed = [os.path.join(path, name) for name in names]
    if others:
        source.lines.append(f"reading the training split; not read: {len(others)} files, {first_few(others)}")
    return source


def _training_split(names: list[str]) -> tuple[list[str], list[str]]:
    """Names of files that belong to the training split, and of those that belong to others.

    Folders name splits, and of tables and shards their own names, too; images may be called anything.
    """
    splits = {}
    for name in names:
        is_example = _is_image(name) or name.endswith(".txt")
        splits[name] = set(SPLITS.findall((os.path.dirname(name) if is_example else name).lower()))
    if not any(found & TRAINING for found in splits.values()):
        return names, []
    others = [name for name in names if splits[name] and not splits[name] & TRAINING]
    return [name for name in names if name not in set(others)], others


def first_few(names: Sequence[str]) -> str:
    """The first three names, for a message."""
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _read_captions(path: str, files: list[str], options: ReadOptions) -> Source:
    """Images with a .txt of the same name beside each."""
    texts = {os.path.splitext(file)[0]: file for file in files if not _is_image(file)}
    images: dict[str, str] = {}
    for image in filter(_is_image, files):
        stem = os.path.splitext(image)[0]
        if stem in images:
            raise DataError(f"{stem}.txt stands beside {images[stem]} and {image}; remove one, or name it otherwise")
        images[stem] = image
    rows = [_image_row(image, text=Path(texts.get(stem, f"{stem}.txt"))) for stem, image in images.items()]
    return _source(path, rows, options, path, [texts[stem] for stem in images if stem in texts])


def _read_labels(path: str, images: list[str], options: ReadOptions) -> Source:
    """Images in one folder per label, whose name is the answer."""
    labels = {}
    for image in images:
        parts = Path(os.path.relpath(image, path)).parent.parts
        labels[image] = [name for name in parts if not SPLITS.fullmatch(name.lower())] or parts
    names = sorted({parts[0] for parts in labels.values() if len(parts) == 1})
    unlabeled = [image for image, parts in labels.items() if len(parts) != 1] or (images if len(names) < 2 else [])
    if unlabeled:
        raise DataError(
            f"captions missing: {len(unlabeled)} images in {path} have no text, the first {unlabeled[0]}; write a "
            ".txt beside each, a metadata.csv, or put them into one folder per label"
        )
    rows = [_image_row(image, **{FOLDER_NAME: parts[0]}) for image, parts in labels.items()]
    source = _source(path, rows, options, path)
    source.lines.append(f"the name of its folder is each image's answer: {', '.join(names)}")
    return source


def _image_row(image: str, **columns: Any) -> Row:
    return {"image": image, **columns, "__folder__": "", "__name__": image}


def _source(path: str, rows: Any, options: ReadOptions, folder: str = "", files: Sequence[str] = ()) -> Source:
    return Source(path, rows, partial(to_example, options=options), folder=folder, files=files)


# ------------------------------------------------------------------------------------------- tables and JSON


def _read_records(path: str, files: list[str], options: ReadOptions) -> Source:
    """The records of tables and JSON files, of which each folder has one."""
    folders = {os.path.dirname(file) for file in files}
    if len(folders) < len(files):
        raise DataError(f"{path} holds {len(files)} such files; name the one to read: {first_few(files)}")
    if files[0].endswith(".parquet"):
        return _read_dataset(path, files, options)
    rows: list[Row] = []
    for file in files:
        with reading_errors(file):
            content = PARSERS[suffix(file)](file)
        if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
            content = _coco(file, content)
        if not isinstance(content, list):
            raise DataError(f"{file} holds {type(content).__name__}, not a list of examples; write [...] around them")
        if not content:
            raise DataError(f"no images found: {file} has no record; name another file")
        if not all(isinstance(record, dict) for record in content):
            raise DataError(f"{file} has records that are no objects; correct it")
        folder = options.images or _image_folder(file, content, options)
        rows += [record | {"__folder__": folder, "__name__": f"{file}[{i}]"} for i, record in enumerate(content)]
    return _source(path, rows, options, folder or "." if len(files) == 1 else path, files)


@contextmanager
def reading_errors(where: object) -> Iterator[None]:
    """Turn what is raised while a file is read and parsed into a DataError of one line."""
    try:
        yield
    except (MemoryError, DataError):
        raise
    except Exception as error:  # the parsers' errors have no common base: json's, csv's, tarfile's, RecursionError
        reason = " ".join(str(error).split()).rstrip(".")
        remedy = "correct the file, or write or download it again"
        if isinstance(error, UnicodeDecodeError):  # of a table that Excel wrote as UTF-16, for example
            remedy = "save it as UTF-8"
        raise DataError(f"{where} cannot be read: {reason}; {remedy}") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8-sig"))  # Windows' editors write a byte order mark


def read_jsonl(path: str | os.PathLike[str]) -> list[Any]:
    """The values of a .jsonl file; blank lines are skipped. DataError names the line at fault."""
    lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    values = []
    for number, line in enumerate(lines, start=1):
        with reading_errors(f"{path}, line {number},"):
            values += [json.loads(line.decode())] if line.strip() else []
    return values


def read_csv(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a .csv or .tsv; DataError for one that can be read in two ways."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        delimiter = max(",;\t", key=file.readline().count)  # Excel writes semicolons in half of Europe
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        columns, rows = reader.fieldnames or [], list(reader)
    if twice := [column for column, n in Counter(columns).items() if column and n > 1]:  # Excel leaves some unnamed
        raise DataError(f"{path} has several columns named {twice[0]!r}; rename or remove all but one")
    for number, row in enumerate(rows, start=1):
        if None in row:  # DictReader's key for them
            raise DataError(
                f"{path}, row {number}, has more cells than columns; put quotes around a text that holds {delimiter!r}"
            )
    return rows


PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".tsv": read_csv,
}


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
    """The folder that image paths start from: the file's own, or the one folder below it that has all."""
    folder = Path(path).parent

    def names() -> Iterator[str]:
        for record in records:
            with suppress(ExampleError):  # which the scan reports
                images = to_example({**record, "__folder__": "", "__name__": ""}, options).images
                yield from (image for image in images if isinstance(image, str) and not os.path.isabs(image))

    if any(os.path.isfile(folder / name) for name in names()) or not (wanted := set(names())):
        return str(folder)
    below = {parent for file in walk(folder) for parent in (folder / file).parents if folder in parent.parents}
    complete = sorted(str(sub) for sub in below if all(os.path.isfile(sub / name) for name in wanted))
    if len(complete) == 1:
        return complete[0]
    problem = f"which {' and '.join(complete)} have" if complete else f"which is not in {folder} or one folder below it"
    raise DataError(
        f"{path} names the image {min(wanted)}, {problem}; name the folder of the images with --images FOLDER"
    )


# -------------------------------------------------------------------------------------- the datasets library


def _read_dataset(path: str, files: list[str], options: ReadOptions) -> Source:
    """The rows of files or, without any, of a folder of `save_to_disk` or a Hub data set owner/name[:subset].

    The split "train" is read, or the only one.
    """
    data = _load(path, files, options)
    notes: list[str] = []
    if isinstance(data, dict):
        if "train" not in data and len(data) > 1:
            raise DataError(f"{path} has no split 'train', only {', '.join(data)}; save the one you mean by itself")
        split = "train" if "train" in data else next(iter(data))
        others = [name for name in data if name != split]
        notes += [f"reading the split {split}; not read: {', '.join(others)}"] if others else []
        data = data[split]
    data = data.with_format("arrow")  # images stay bytes, so that a broken one is an error that names its row
    notes += [
        note for file in files if file.endswith(".tar") and os.path.exists(file) for note in _tar_notes(file, data)
    ]
    if not hasattr(data, "data"):
        return Stream(path, data, partial(to_example, options=options), lines=notes, files=files)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    example = partial(
        _row_of_dataset, data=data, path=path, folder=folder if os.path.exists(path) else "", options=options
    )
    return Source(path, range(len(data)), example, lines=notes, files=files)


def _row_of_dataset(i: int, data: Any, path: str, folder: str, options: ReadOptions) -> Example:
    return to_example(plain_row(data[i].to_pylist()[0], data.features, folder, f"{path}[{i}]"), options)


def _tar_notes(file: str, data: Any) -> list[str]:
    """What `datasets` passes over in a tar; DataError for two files of one name."""
    with reading_errors(file), tarfile.open(file) as tar:
        names = Counter(member.name for member in tar if member.isfile())
    if twice := [name for name, n in names.items() if n > 1]:
        raise DataError(f"{file} has two files {twice[0]}; name one otherwise")
    notes = []
    known = {column.lower() for column in data.features or ()}
    unread = [name for name in names if os.path.basename(name).partition(".")[2].lower() not in known]
    if unread:
        notes.append(
            f"not read: {len(unread)} files of types that the first samples of {file} lack, the first {unread[0]}"
        )
    with open(file, "rb") as raw:
        raw.seek(-1024, os.SEEK_END)
        if any(raw.read()):
            notes.append(f"{file} has no end mark: it may have been cut")
    return notes


def _load(path: str, files: list[str], options: ReadOptions) -> Any:
    """A Dataset, IterableDataset or a dict of them by split."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"{path} is read with the datasets library: {INSTALL_DATA}") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below, once
    try:
        if files:
            builder = BUILDERS[suffix(files[0].partition("?")[0])]
            return datasets.load_dataset(builder, data_files=files, streaming=options.stream)
        if os.path.isdir(path):
            return datasets.load_from_disk(path)
        name, _, subset = path.partition(":")
        return datasets.load_dataset(name, subset or None, streaming=options.stream)
    except Exception as error:  # the library raises errors of many kinds, from DNS to disk
        is_wrapped = isinstance(error, datasets.exceptions.DatasetGenerationError)
        reason = first_line(error.__cause__ or error if is_wrapped else error)
        hint = "write or download it again" if os.path.exists(path) else "if you are offline, name a local folder"
        raise DataError(f"{path}: the datasets library cannot read it: {reason}; {hint}") from None
