"""JSON files of examples: COCO's captions, LLaVA's conversations, chats of messages, or records of plain columns."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nanovlm.data.folders import imagefolder_source, read_table
from nanovlm.data.formats import applicable_options, clean_text, record_image_path, record_to_example
from nanovlm.data.source import Source, captioned_source
from nanovlm.errors import DataError
from nanovlm.options import ReadOptions


def open_json(path: str, files: Sequence[str], options: ReadOptions) -> Source:
    """The examples of a .json or .jsonl file, whose layout is found by its keys."""
    if len(files) > 1:
        raise DataError(f"{path} holds {len(files)} .json files; name the one to read: {files[0]}")
    file = str(Path(files[0]))
    content = read_table(Path(file))
    if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
        return _open_coco(file, content, options)
    records = _check_records(file, content)
    if "file_name" in records[0]:
        return imagefolder_source(str(Path(file).parent), {file: records}, options)
    supported = applicable_options(records[0], file, options)
    paths = [record_image_path(record) for record in records]
    root = _find_image_root(file, [image or "" for image in paths], options)
    make_example = partial(record_to_example, root=root, options=options)
    keys = [image or str(i) for i, image in enumerate(paths)]
    return Source(file, records, make_example, keys, supported_options=["images", *supported])


def _check_records(path: str, content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise DataError(f"{path} holds {type(content).__name__}, not a list of examples; write [...] around them")
    if not content:
        raise DataError(f"no images found: {path} has no record; name another file")
    for i, record in enumerate(content):
        if not isinstance(record, dict):
            raise DataError(f"{path}[{i}] is {type(record).__name__}, not an object")
    return content


def _open_coco(path: str, content: dict[str, Any], options: ReadOptions) -> Source:
    """COCO's captions: every image with all its captions, each as an independent answer."""
    try:
        files = {image["id"]: str(image["file_name"]) for image in content["images"]}
        samples: dict[str, dict[str, Any]] = {file: {"image": file, "captions": []} for file in files.values()}
        for annotation in content["annotations"]:
            samples[files[annotation["image_id"]]]["captions"].append(clean_text(annotation["caption"]))
    except KeyError as error:
        raise DataError(
            f"{path} looks like COCO's captions, but lacks {error}, a key or an image's id; write it"
        ) from None
    except TypeError as error:
        raise DataError(f"{path} looks like COCO's captions, but has another structure: {error}; correct it") from None
    if not samples:
        raise DataError(f"no images found: {path} lists none; name another file")
    root = _find_image_root(path, samples, options) or str(Path(path).parent)
    options_of_captions = replace(options, text_column="captions", prompt_column=None)
    make_example = partial(record_to_example, root=root, options=options_of_captions)
    has_caption = lambda record: bool(record["captions"])  # noqa: E731
    return captioned_source(root, samples, has_caption, "annotation", make_example, options, ["prompt", "images"])


def _find_image_root(path: str, images: Iterable[str], options: ReadOptions) -> str:
    """The folder that a JSON file's image paths start from: --images, or a folder near the file that has the first."""
    first = next((image for image in images if image and not image.startswith(("data:", "http://", "https://"))), None)
    if first is None or os.path.isabs(first):
        return options.images or ""
    folder = Path(path).parent
    nearby = [folder, *_subfolders(folder), *_subfolders(folder.parent)]
    for root in [Path(options.images)] if options.images else nearby:
        if os.path.isfile(root / first):
            return str(root)
    searched = options.images or f"{folder}, the folders in it or beside it"
    raise DataError(f"{path} names the image {first}, which is not in {searched}; name its folder with --images FOLDER")


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # no permission to list it
        return []
