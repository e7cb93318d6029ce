"""Finding images: files, folders, patterns, and lists of names."""

import codecs
import glob
import os
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanovlm.data.rows import walk
from nanovlm.errors import ImageError, UsageError
from nanovlm.processing.image_loading import IMAGE_EXTENSIONS, readable_extensions


@dataclass
class ImageList:
    """Images by path, each once, in the order they were named; and what else the names gave."""

    paths: list[str] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)  # names that gave no image, with the reason
    left_out: Counter[str] = field(default_factory=Counter)  # images that cannot be read here, by extension

    def takes(self, file: str, extensions: Collection[str]) -> bool:
        """Whether a file has one of the extensions; an image with another one is counted as left out."""
        extension = os.path.splitext(file)[1].lower()
        self.left_out.update([extension] if extension in IMAGE_EXTENSIONS.difference(extensions) else [])
        return extension in extensions


def find_images(
    names: Sequence[str | os.PathLike[str]], recursive: bool = True, extensions: Collection[str] | None = None
) -> ImageList:
    """Find the images that files, folders and patterns name; an image named twice is found once.

    A file is taken as it is, even if it does not exist: reading it then fails with the reason. recursive says whether
    the subfolders of folders are searched, too. extensions are those of other files to find, of videos for example.
    """
    images, known = ImageList(), set()
    for name in names:
        for path in _images_of(os.fspath(name), images, recursive, extensions or readable_extensions()):
            if (place := real_place(path)) not in known:
                known.add(place)
                images.paths.append(path)
    return images


def real_place(path: str | Path) -> str:
    """A path with the real path of its folder: a link to an image is an image of its own, which has its own sidecar."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _images_of(name: str, images: ImageList, recursive: bool, wanted: Collection[str]) -> list[str]:
    if os.path.isdir(name):
        return _images_in(name, images, recursive, wanted)
    if not glob.has_magic(name) or os.path.lexists(name):  # a file may be named [1].png
        return [name]
    matches = sorted(glob.glob(name, recursive=True))
    paths = [match for match in matches if images.takes(match, wanted)]
    for folder in filter(os.path.isdir, matches):
        paths += _images_in(folder, images, recursive, wanted)
    if not paths:
        images.missing.append((name, "a pattern that matches no image"))
    return paths


def _images_in(folder: str, images: ImageList, recursive: bool, wanted: Collection[str]) -> list[str]:
    unreadable: list[OSError] = []
    found = sorted(path for path in walk(folder, unreadable.append, recursive) if images.takes(path, wanted))
    images.missing += [(error.filename, str(error.strerror)) for error in unreadable]
    if not found and not unreadable:
        images.missing.append((folder, "a folder without images"))
    return [os.path.join(folder, path) for path in found]


def check_file(path: str) -> str:
    """The path. ImageError if it is a folder or a pipe, of which opening may block forever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ImageError("not a file")
    return path


def read_names(file: str | os.PathLike[str] | None) -> list[str]:
    """Read names from a file, if any, or from standard input (-): one a line, or each ended by a zero byte."""
    if file is None:
        return []
    if file == "-" and sys.stdin is None:
        raise UsageError("the list of names is -, but standard input is closed; name a file")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"list of names {os.fspath(file)!r}: {error.strerror}") from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # as PowerShell writes
        data = data.decode("utf-16", "replace").encode()
    data = data.removeprefix(codecs.BOM_UTF8)
    names = data.split(b"\0") if b"\0" in data else data.splitlines()
    return [os.fsdecode(name) for name in names if name.strip()]
