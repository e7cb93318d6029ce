"""JSON files of examples: COCO's captions, LLaVA's conversations, chats of messages, or records of plain columns."""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from nanovlm.data.examples import Example
from nanovlm.data.folders import imagefolder_source
from nanovlm.data.formats import (
    CHAT_COLUMNS,
    applicable_options,
    clean_text,
    passes_ratings,
    record_image_path,
    record_images,
    record_to_example,
)
from nanovlm.data.jsonl import read_jsonl
from nanovlm.data.source import ReadOptions, Source, check_captions
from nanovlm.errors import DataError


def open_json(path: Path, options: ReadOptions) -> Source:
    """The examples of a .json or .jsonl file, whose layout is found by its keys."""
    content = _read_json(path)
    if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
        return _open_coco(path, content, options)
    records = _check_records(path, content)
    if records and "file_name" in records[0]:
        return imagefolder_source(str(path.parent), {path: records}, options)
    record_numbers = [i for i, record in enumerate(records) if passes_ratings(record, options)]
    records = [records[i] for i in record_numbers]
    if not records:
        raise DataError(f"no images found: {path} has no record{' rated so high' if options.min_ratings else ''}")
    supported = _check_layout(path, records[0], options)
    image_paths = [record_image_path(record) for record in records]
    root = _find_image_root(path, [image for image in image_paths if image], options)
    return Source(
        str(path),
        records,
        partial(record_to_example, root=root, options=options),
        keys=[image or str(i) for i, image in zip(record_numbers, image_paths)],
        supported_options=supported,
        record_numbers=record_numbers,
    )


def _read_json(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON
        raise DataError(f"{path} cannot be read: {error}; correct the file, or write or download it again") from None


def _check_records(path: Path, content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise DataError(f"{path} holds {type(content).__name__}, not a list of examples")
    for i, record in enumerate(content):
        if not isinstance(record, dict):
            raise DataError(f"{path}[{i}] is {type(record).__name__}, not an object")
    return content


def _check_layout(path: Path, record: dict[str, Any], options: ReadOptions) -> list[str]:
    """The options that apply to records like this one; DataError if it has no known layout."""
    known = {*CHAT_COLUMNS, "texts"} & record.keys()
    if not known and not record_images(record):
        raise DataError(
            f"{path} is none of COCO's captions (images, annotations), conversations, messages, texts, or records "
            f"with an image and a text; its records have {', '.join(sorted(record))}"
        )
    return ["images", *applicable_options(record, str(path), options)]


def _open_coco(path: Path, content: dict[str, Any], options: ReadOptions) -> Source:
    """COCO's captions: every image with all its captions, each as an independent answer."""
    try:
        files = {image["id"]: str(image["file_name"]) for image in content["images"]}
        captions: dict[Any, list[str]] = {id: [] for id in files}
        for annotation in content["annotations"]:
            captions[annotation["image_id"]].append(clean_text(annotation["caption"]))
    except KeyError as error:
        raise DataError(f"{path} looks like COCO's captions, but lacks {error}, a key or an image's id") from None
    except TypeError as error:
        raise DataError(f"{path} looks like COCO's captions, but has another structure: {error}") from None
    if not files:
        raise DataError(f"no images found: {path} lists none")
    uncaptioned = [files[id] for id, texts in captions.items() if not texts]
    check_captions(str(path), "have none", uncaptioned, len(files), options)
    records = [(files[id], texts) for id, texts in captions.items() if texts]
    keys = [file for file, _ in records]
    root = _find_image_root(path, keys, options) or str(path.parent)
    make_example = partial(_coco_example, prompt=options.prompt)
    return Source(root, records, make_example, keys, named_by_key=True, supported_options=["prompt", "images"])


def _coco_example(record: tuple[str, list[str]], name: str, prompt: str) -> Example:
    return Example([name], [(prompt, caption) for caption in record[1]], name)


def _find_image_root(path: Path, images: Iterable[str], options: ReadOptions) -> str:
    """The folder that a JSON file's image paths start from: --images, or a folder near the file that has the first."""
    first = next((image for image in images if not image.startswith(("data:", "http://", "https://"))), None)
    if first is None or Path(first).is_absolute():
        return options.images or ""
    nearby = [path.parent, *_subfolders(path.parent), *_subfolders(path.parent.parent)]
    for folder in [Path(options.images)] if options.images else nearby:
        if (folder / first).is_file():
            return str(folder)
    searched = options.images or f"{path.parent}, the folders in it or beside it"
    raise DataError(f"{path} names the image {first}, which is not in {searched}; name its folder with --images FOLDER")


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # no permission to list it
        return []
