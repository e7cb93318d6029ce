"""`open_source`: what a folder, a file or a Hub data set holds, as examples."""

import csv
import io
import os
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from models.checkpoint import CONFIG, INDEX, WEIGHTS
from models.common import files as file_gate
from models.common.errors import FileError
from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.records import FOLDER_NAME, IMAGE_FILE, MAX_VALUES, Record, is_image, options_for, to_example
from nanovlm.data.source import DESCRIBED, Source, StreamedSource
from nanovlm.data.splits import Splits
from nanovlm.data.values import has_names, parse_json, plain_value
from nanovlm.errors import DataError, first_line, needs_extra
from nanovlm.folders import walk
from nanovlm.options import ReadOptions

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")  # tables of Hugging Face's imagefolder
TOP = ((".csv", ".tsv"), (".json", ".jsonl"))  # read in a folder, but not below it
BUILDERS = {".tar": "webdataset", ".parquet": "parquet", ".arrow": "arrow"}  # of `datasets`, by a file's extension
KINDS = (
    "images with a .txt beside each, one folder of images per label, metadata.jsonl, .csv or .parquet, a .csv, a .json "
    "or .jsonl of records, chats or COCO's captions, .tar, .parquet or .arrow files, or a Hub data set owner/name"
)
CAPTIONS = re.compile(r"\.(txt|text|cap\w*|tags?|prompts?|desc\w*)")  # extensions of texts beside images
HUB_DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.,() -]+)?")  # owner/name or owner/name:subset
JOIN_VQA = (  # VQA v1 and v2 keep them in two files
    "join the files of questions and annotations by question_id, and write a list of records with image "
    "(such as COCO_train2014_000000000009.jpg), question and answers"
)
Reader = Callable[[str, list[str], ReadOptions], Source]  # of the files at a path


def open_source(path: str, options: ReadOptions) -> Source:
    """The examples at a path, all of which are read once unless they are streamed. DataError for what cannot be."""
    if path == "scenes" and not os.path.exists(path):
        from nanovlm.synthetic.recipe import scene_source  # here: other data do without the drawer

        return scene_source()
    source = _open(path, options)
    if source.folder and not source.listed:
        source.listed = [os.path.join(source.folder, name) for name in filter(is_image, all_files(source.folder))]
    if isinstance(source, StreamedSource):
        source.scan(list(islice(source.all_rows(), DESCRIBED)), options.skip_errors)
    else:
        source.rows = source.scan(source.rows, options.skip_errors)
    return source


def _open(path: str, options: ReadOptions) -> Source:
    if os.path.isdir(path):
        return _open_folder(path, options)
    if HUB_DATASET.fullmatch(path) and not os.path.exists(path):
        return _read_dataset(path, [], options)
    if "://" not in path and not os.path.isfile(path):
        reason = " is not a file" if os.path.exists(path) else ": no such file or folder"
        raise DataError(f"{path}{reason}; data is {KINDS}")
    reader = _reader_of(path.partition("?")[0])
    if reader is None:
        raise DataError(f"{path} has no known extension; data is {KINDS}")
    return reader(path, [path], options)


def _reader_of(name: str) -> Reader | None:
    return _read_records if suffix(name) in PARSERS else _read_dataset if suffix(name) in BUILDERS else None


def suffix(name: str) -> str:
    """The extension of a file's name, in lower case."""
    return os.path.splitext(name)[1].lower()


# --------------------------------------------------------------------------------------------------- folders


def all_files(folder: str | Path, onerror: Callable[[OSError], None] | None = None) -> list[str]:
    """Sorted paths of all files in a folder and its subfolders, relative to it; see `nanovlm.folders.walk`."""
    found = (os.path.join(current, name) for current, names in walk(folder, onerror) for name in names)
    return sorted(os.path.relpath(path, folder) for path in found)


def _refuse_folder(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be opened: {error.strerror}; allow it, or move the folder away")


def _open_folder(path: str, options: ReadOptions) -> Source:
    """Read the first of the kinds of data that a folder holds; the scan names the other files."""
    found = all_files(path, _refuse_folder)
    here = {name for name in found if os.sep not in name}
    if CONFIG in here and here & {WEIGHTS, INDEX}:
        raise DataError(f"{path} holds a model, not data; pass it as --model {path}, and name the data")
    if here & {"dataset_dict.json", "state.json"}:  # of save_to_disk
        return _read_dataset(path, [], options)
    splits = Splits(found, is_image, _reader_of)
    named = {name: splits.of(name) for name in found}
    wanted = {"", "train"} if "train" in named.values() else set(named.values())
    names = [name for name in found if named[name] in wanted]
    left_out = sorted(set(found).difference(names))
    images = list(filter(is_image, names))
    stems = {os.path.splitext(name)[0] for name in images}
    beside = [name for name in names if os.path.splitext(name)[0] in stems and not is_image(name)]
    extension = f".{(options.extension or 'txt').removeprefix('.').lower()}"
    texts = [name for name in beside if suffix(name) == extension]
    kinds = [[name for name in names if os.path.basename(name) in METADATA], images + texts if texts else []]
    kinds += [[name for name in names if suffix(name) == kind] for kind in BUILDERS]
    kinds += [[name for name in names if suffix(name) in top and name in here] for top in TOP]
    files = next(filter(None, kinds), images)
    if not files:
        raise DataError(f"no images found in {path}; data is {KINDS}")
    reader = _reader_of(files[0])
    if reader:  # the rows, not the folders, say which images are read
        left_out = [name for name in left_out if not is_image(name)]
    captions = [name for name in beside if CAPTIONS.fullmatch(suffix(name))]
    hint = f"; --extension {suffix(captions[0])} reads {captions[0]} and its like" if captions else ""
    if unread := [name for name in sorted(here) if suffix(name) == ".txt" and not beside]:
        hint = f"; {unread[0]} stands beside no image: if it is a table, call it .csv"
    reader = reader or (_read_captions if texts else partial(_read_labels, splits=splits, hint=hint))
    source = reader(path, [os.path.join(path, name) for name in files], options)
    told = {*left_out, *files}.difference(images)
    source.listed = [os.path.join(path, name) for name in found if name not in told]
    if left_out:
        source.lines.append(f"reading the training split; not read: {len(left_out)} files, {left_out[0]} ...")
    elif len(found := sorted({named[name] for name in files} - {""})) > 1:
        source.lines.append(f"there is no training split: reading {' and '.join(found)}")
    return source


def _read_captions(path: str, files: list[str], options: ReadOptions) -> Source:
    """Images with a text of the same name beside each."""
    extension = next(suffix(file) for file in files if not is_image(file))
    texts = {os.path.splitext(file)[0]: file for file in files if not is_image(file)}
    images: dict[str, str] = {}
    for image in filter(is_image, files):
        stem = os.path.splitext(image)[0]
        if images.setdefault(stem, image) != image:
            raise DataError(f"{stem}{extension} stands beside {images[stem]} and {image}; remove one")
    rows = [
        Record({IMAGE_FILE: image, "text": Path(texts.get(stem, f"{stem}{extension}"))}, image)
        for stem, image in images.items()
    ]
    return _source(path, rows, options, path)


def _read_labels(path: str, images: list[str], options: ReadOptions, splits: Splits, hint: str) -> Source:
    """Images in one folder per label, whose name is the answer."""
    labels = {image: splits.classes(os.path.relpath(image, path)) for image in images}
    unlabeled = [image for image, folders in labels.items() if len(folders) != 1]
    classes = sorted({folders[0] for folders in labels.values() if folders})
    if unlabeled or len(classes) < 2:
        unlabeled = unlabeled or images
        raise DataError(
            f"captions missing: {len(unlabeled)} images in {path} have no text, the first {unlabeled[0]}; write a "
            f".txt beside each, a metadata.csv, or put them into one folder per label{hint}"
        )
    rows = [
        Record({IMAGE_FILE: image, FOLDER_NAME: folders[0]}, image, classes=[FOLDER_NAME])
        for image, folders in labels.items()
    ]
    source = _source(path, rows, options, path)
    source.lines.append(f"the name of its folder is each image's answer: {', '.join(classes)}")
    return source


def _columns(rows: Iterable[Record]) -> dict[str, None]:
    """All columns of rows, in order."""
    return dict.fromkeys(column for row in rows for column in row.values if not column.startswith("__"))


def _source(path: str, rows: list[Record], options: ReadOptions, folder: str) -> Source:
    columns = _columns(rows)
    make_example = partial(to_example, options=options_for(columns, options))
    return Source(path, rows, make_example, folder=folder, columns=columns)


# ------------------------------------------------------------------------------------------- tables and JSON


def _read_records(path: str, files: list[str], options: ReadOptions) -> Source:
    """The records of tables and JSON files, of which each folder has one."""
    if len({*map(os.path.dirname, files)}) < len(files):
        raise DataError(
            f"{path} holds {len(files)} such files; name the one to read: {', '.join(files[:3])}; of records beside "
            "each image make one metadata.jsonl"
        )
    rows: list[Record] = []
    lines: list[str] = []
    for file in files:
        with reading_errors(file):
            content = PARSERS[suffix(file)](file)
            if isinstance(content, dict):
                content = _records_of(file, content, lines)
        if not (isinstance(content, list) and all(isinstance(record, dict) for record in content)):
            kind = type(content).__name__
            if isinstance(content, dict):
                kind = f"an object with {', '.join(map(repr, islice(content, 3)))}{', ...' * (len(content) > 3)}"
            raise DataError(f"{file} holds {kind}, not a list of objects; write [{{...}}, ...]")
        is_csv = PARSERS[suffix(file)] is read_csv
        records = [Record(record, f"{file}[{i}]", is_csv=is_csv) for i, record in enumerate(content)]
        folder = _image_folder([os.path.dirname(file)], records, options_for(_columns(records), options))
        rows += [replace(record, folder=folder) for record in records]
    source = _source(path, rows, options, folder or "." if len(files) == 1 else path)
    source.lines += lines
    return source


@contextmanager
def reading_errors(where: object) -> Iterator[None]:
    """Turn any error of reading or parsing a file into a DataError of one line."""
    try:
        yield
    except (MemoryError, DataError):
        raise
    except FileError as error:
        raise DataError(str(error)) from None
    except Exception as error:  # the parsers' errors have no common base: json's, csv's, tarfile's, RecursionError
        reason = " ".join(str(error).split()).rstrip(".")
        is_text = not isinstance(error, UnicodeDecodeError)  # and not a table that Excel wrote as UTF-16, for example
        remedy = "correct the file, or write or download it again" if is_text else "save it as UTF-8"
        raise DataError(f"{where} cannot be read: {reason}; {remedy}") from None


def read_jsonl(path: str) -> list[Any]:
    """The values of a .jsonl file; blank lines are skipped. DataError names the line at fault."""
    values = []
    for number, line in enumerate(file_gate.read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        with reading_errors(f"{path}, line {number},"):
            values += [parse_json(line.decode())] if line.strip() else []
    return values


def read_csv(path: str) -> list[dict[str, str]]:
    """Rows of a .csv or .tsv; DataError for one that can be read in two ways."""
    text = file_gate.read_bytes(path).decode("utf-8-sig")
    first, *rest = re.split(r"\r?\n|\r", text, maxsplit=1)
    delimiter = max(",;\t", key=first.count)  # Excel writes semicolons in half of Europe
    if named := re.fullmatch(r"sep=(.)", first):  # and a line of its own
        delimiter, text = named[1], "".join(rest)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        columns, *rows = [row for row in lines if row] or [[]]
    except csv.Error as error:
        if "field limit" not in str(error):
            raise
        place = f"{path}, line {lines.line_num}"
        limit = f"{csv.field_size_limit():,} letters"
        raise DataError(
            f"{place}, has a cell of more than {limit}; close its quotes, or name an image by its file"
        ) from None
    if len(columns) > MAX_VALUES:
        raise DataError(f"{path} has {len(columns):,} columns in its first line; at most {MAX_VALUES:,} are read")
    if twice := [column for column, n in Counter(columns).items() if column and n > 1]:  # Excel leaves some unnamed
        raise DataError(f"{path} has several columns named {twice[0]!r}; rename or remove all but one")
    for number, row in enumerate(rows, start=1):
        if len(row) > len(columns):
            remedy = f"put quotes around a text that holds {delimiter!r}"
            raise DataError(f"{path}, row {number}, has more cells than columns; {remedy}")
    return [dict(zip(columns, row)) for row in rows]


PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": lambda path: parse_json(file_gate.read_bytes(path).decode("utf-8-sig")),  # Windows writes a mark
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".tsv": read_csv,
}


def _records_of(path: str, content: dict[str, Any], lines: list[str]) -> Any:
    """The records in an object: COCO's captions, or its only list of objects, about which a line goes to lines."""
    lists = {key: value for key, value in content.items() if isinstance(value, list) and value}
    lists = {key: value for key, value in lists.items() if isinstance(value[0], dict)}
    annotation = lists.get("annotations", [{}])[0]
    question = lists.get("questions", [{}])[0]
    if "multiple_choice_answer" in annotation:
        raise DataError(f"{path} holds VQA's answers without their questions; {JOIN_VQA}")
    if "question_id" in question and not question.keys() & {"answer", "answers"}:
        raise DataError(f"{path} holds VQA's questions without their answers; {JOIN_VQA}")
    if {"images", "annotations"} <= content.keys():
        if annotation and "caption" not in annotation:
            remedy = "take captions_*.json, or put images into one folder per label"
            raise DataError(f"{path} holds COCO's objects in images, without captions; {remedy}")
        return _coco(path, content)
    if len(lists) != 1:
        return content
    (name,) = lists
    others = ", ".join(key for key in content if key != name)
    lines.append(f"reading the list {name!r}" + (f"; not read: {others}" if others else ""))
    return lists[name]


def _coco(path: str, content: dict[str, Any]) -> list[dict[str, Any]]:
    """COCO's captions: a record for each image, with all its captions."""
    captions: dict[Any, list[str]] = defaultdict(list)
    for annotation in content["annotations"]:
        captions[annotation["image_id"]].append(annotation["caption"])
    n = Counter(image["id"] for image in content["images"])
    for id in (*captions, *n):
        if n[id] != 1:
            raise DataError(f"{path} has {n[id] or 'captions but no'} images with the id {id!r}; correct it")
    return [{"file_name": image["file_name"], "captions": captions[image["id"]]} for image in content["images"]]


def _image_folder(folders: list[str], rows: Sequence[Record], options: ReadOptions) -> str:
    """Find the folder that the image paths of rows start from.

    It is --images, if one image is there; else the first of folders with one; else the one folder below the last of
    them that has all.
    """
    names = []
    for row in rows:
        with suppress(ExampleError):  # which the scan reports
            images = to_example(row, options).images
            found = [image for image in images if isinstance(image, str) and not os.path.isabs(image)]
            for start in [options.images, *folders]:
                if start is not None and any(os.path.isfile(os.path.join(start, name)) for name in found):
                    return start
            names += found
    folder = Path(folders[-1])
    if options.images or not names:
        return options.images if options.images and names else folders[-1]
    below = {parent for file in all_files(folder) for parent in (folder / file).parents if folder in parent.parents}
    complete = sorted(str(sub) for sub in below if all(os.path.isfile(sub / name) for name in names))
    if len(complete) == 1:
        return complete[0]
    problem = f"which {' and '.join(complete)} have" if complete else f"which is not in {folder} or one folder below it"
    problem += ", as names of files have no %20" * ("%" in names[0])
    where = rows[0].name.rpartition("[")[0]
    raise DataError(
        f"{where} names the image {names[0]}, {problem}; name the folder of the images with --images FOLDER"
    )


# -------------------------------------------------------------------------------------- the datasets library


def _read_dataset(path: str, files: list[str], options: ReadOptions) -> Source:
    """The rows of files, or of a folder of `save_to_disk` or a Hub data set: of the split "train", or the only one."""
    data = _load(path, files, options)
    notes: list[str] = []
    if isinstance(data, dict):
        split = "train" if len(data) > 1 else next(iter(data))
        if split not in data:
            raise DataError(f"{path} has no split 'train', only {', '.join(data)}; save the one you mean by itself")
        others = [name for name in data if name != split]
        notes = [f"reading the split {split}; not read: {', '.join(others)}"] if others else []
        data = data[split]
    data = data.with_format("arrow")  # images stay bytes, so that a broken one is an error that names its row
    for file in files:
        if file.endswith(".tar") and os.path.exists(file):
            notes += _tar_notes(file, data.features)
    sample: list[Record] = []
    with reading_errors(path):
        for table in islice(data.iter(batch_size=1), DESCRIBED):
            with suppress(ExampleError):  # which the scan reports
                sample.append(row_of_table((table, f"{path}["), "", data.features))
    columns = _columns(sample)
    options = options_for(columns, options)
    folder = ""
    if os.path.exists(path):
        folders = [os.path.dirname(files[0])] if files else []
        folder = _image_folder([*folders, path] if os.path.isdir(path) else folders, sample, options)
    make_example = partial(example_of_table, folder=folder, features=data.features, options=options)
    known: dict[str, Any] = {"lines": notes, "columns": columns, "folder": folder if folder == options.images else ""}
    if not hasattr(data, "data"):
        return StreamedSource(path, data, make_example, **known)
    make_example = partial(_example_at, data=data, path=path, make_example=make_example)
    return Source(path, range(len(data)), make_example, **known)


def example_of_table(row: tuple[Any, str], folder: str, features: Any, options: ReadOptions) -> Example:
    """The example that a row of `datasets` holds, streamed or not; see `row_of_table` and `to_example`."""
    return to_example(row_of_table(row, folder, features), options)


def row_of_table(row: tuple[Any, str], folder: str, features: Any) -> Record:
    """Convert an Arrow table of one row, with its name; a tar's sample becomes its .txt and the record in its .json."""
    table, name = row
    try:
        (values,) = table.to_pylist()
        values = {at.name: plain_value(values[at.name], at.type, (features or {}).get(at.name)) for at in table.schema}
    except (ArithmeticError, ImportError, LookupError, NotImplementedError, OSError, ValueError) as error:
        raise ExampleError(f"{name} cannot be read: {first_line(error)}") from None
    is_sample = "__key__" in values
    if is_sample:
        name = f"{name} {values['__key__']}"
        record = values.pop("json", None)
        values = (record if isinstance(record, dict) else {}) | values
        if (text := values.pop("txt", None)) is not None:
            values["text"] = text
        pages = [kind for kind in values if is_image(kind) and re.search(r"\d\.\w+$", kind)]
        pages.sort(key=lambda kind: [int(number) for number in re.findall(r"\d+", kind)])
        if images := [image for kind in pages if (image := values.pop(kind)) is not None]:
            values["images"] = images
    classes = [column for column, feature in (features or {}).items() if has_names(feature)]
    return Record(values, name, folder, classes, is_sample=is_sample)


def _example_at(i: int, data: Any, path: str, make_example: Callable[[tuple[Any, str]], Example]) -> Example:
    return make_example((data[i], f"{path}[{i}]"))


def _tar_notes(file: str, features: Any) -> list[str]:
    """Notes on a tar: files that `datasets` skips, as the first samples have none of their type, and a missing end."""
    with reading_errors(file), file_gate.opened(file) as raw, tarfile.open(fileobj=raw) as tar:
        names = []
        for member in filter(tarfile.TarInfo.isfile, tar):
            names.append(member.name)
            is_record = re.search(r"(^|/)[^./][^/]*\.json$", member.name.lower())  # and no hidden file, as macOS adds
            if is_record and (content := tar.extractfile(member)):
                with reading_errors(f"{file}, {member.name},"):
                    parse_json(content.read())  # `datasets` takes the last of two values of a key
        raw.seek(-1024, os.SEEK_END)
        notes = [f"{file} has no end mark: it may have been cut"] if any(raw.read()) else []
    if twice := [name for name, n in Counter(names).items() if n > 1]:  # which older versions of `datasets` merge
        raise DataError(f"{file} has two files {twice[0]}; name one otherwise")
    known = {kind.lower() for kind in features or ()}
    if unread := [name for name in names if os.path.basename(name).partition(".")[2].lower() not in known]:
        notes.append(f"not read: {len(unread)} files of types that the first samples lack, the first {unread[0]}")
    return notes


def _load(path: str, files: list[str], options: ReadOptions) -> Any:
    """A Dataset, IterableDataset or a dict of them by split."""
    with needs_extra("data", path):
        import datasets
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below, once
    for file in files:
        if os.path.exists(file):
            with reading_errors(file):
                file_gate.check_regular(file)
    try:
        if not files and os.path.isdir(path):
            return datasets.load_from_disk(path)
        name, _, subset = path.partition(":")
        if files:
            name = BUILDERS[suffix(files[0].partition("?")[0])]
            subset = ""
        return datasets.load_dataset(name, subset or None, data_files=files or None, streaming=options.stream)
    except Exception as error:  # the library raises errors of many kinds, from DNS to disk
        reason = first_line(error.__cause__ or error)
        hint = "write or download it again" if os.path.exists(path) else "if you are offline, name a local folder"
        if "dtype equivalent" in reason:
            hint = "write that column as a text, or leave it out"
        raise DataError(f"{path}: the datasets library cannot read it: {reason}; {hint}") from None
