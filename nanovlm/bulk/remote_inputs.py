"""Finding and reading images at any URI that pyarrow or fsspec opens: files, folders and patterns."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from PIL import Image

from models.checkpoint import WEIGHTS
from nanovlm.bulk.inputs import ImageList, check_file
from nanovlm.data.remote import first_line
from nanovlm.errors import UsageError
from nanovlm.processing.image_loading import load_image, readable_extensions

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from fsspec.core import OpenFile


def open_filesystem(uri: str) -> tuple["AbstractFileSystem", str, str]:
    """The file system of a URI or local path, the path in it, and the prefix that makes a URI of such a path.

    pyarrow opens file://, s3://, gs:// and hdfs:// by itself; other schemes need the package that fsspec names.
    """
    from fsspec.core import url_to_fs
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem

    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", uri) or uri.startswith("file://"):
        return url_to_fs("/")[0], os.path.abspath(uri.removeprefix("file://")), ""
    try:
        arrow, path = FileSystem.from_uri(uri)
        filesystem = ArrowFSWrapper(arrow)
    except (ArrowException, OSError) as error:  # another scheme, or characters that are not valid in a URI
        try:
            filesystem, path = url_to_fs(uri)
        except (ImportError, ValueError, OSError) as other:
            raise UsageError(f"{uri}: cannot be opened: {first_line(error)}; {first_line(other)}") from None
    return filesystem, path, uri.partition(path.rstrip("/"))[0]


def find_remote(names: Sequence[str | os.PathLike[str]], recursive: bool) -> tuple[dict[str, "OpenFile"], ImageList]:
    """The images that files, folders and patterns name, by URI; and what else the names gave.

    Hidden files and model folders are left out, as `walk` does. recursive says whether subfolders are searched, too.
    """
    from fsspec.core import OpenFile

    files: dict[str, OpenFile] = {}
    others = ImageList()
    for name in [os.fspath(name) for name in names]:
        filesystem, path, prefix = open_filesystem(name)
        try:
            found = _expand(filesystem, path, recursive, others)
        except OSError as error:
            others.missing.append((name, error.strerror or first_line(error)))
            continue
        if not found:
            others.missing.append((name, "no images there"))
        files |= {prefix + path: OpenFile(filesystem, path) for path in found}
    return files, others


def _expand(filesystem: "AbstractFileSystem", path: str, recursive: bool, others: ImageList) -> list[str]:
    """The files that a file, folder or pattern stands for. OSError if there is no such thing."""
    if filesystem.isdir(path):
        base = path.rstrip("/")
        found = filesystem.find(path, maxdepth=None if recursive else 1, on_error="raise")
    elif filesystem.exists(path):
        return [path]
    elif glob.has_magic(path):
        base = re.split(r"[*?[]", path)[0].rpartition("/")[0]
        found = [file for file, info in filesystem.glob(path, detail=True).items() if info["type"] != "directory"]
    else:
        raise FileNotFoundError("No such file or directory")
    files = [PurePosixPath(file[len(base) + 1 :]) for file in sorted(found)]
    model_folders = {file.parent for file in files if file.name == WEIGHTS} - {PurePosixPath(".")}
    hidden = {file for file in files if any(part.startswith(".") for part in file.parts)}
    visible = [file for file in files if file not in hidden and model_folders.isdisjoint(file.parents)]
    readable = readable_extensions()
    return [f"{base}/{file}" for file in visible if others.takes(file.name, readable)]


def read_image(uri: str, file: "OpenFile") -> Image.Image:
    """The image in a file. ImageError if it is none, OSError if the file cannot be read."""
    check_file(uri)
    return load_image(file.fs.cat_file(file.path), uri)
