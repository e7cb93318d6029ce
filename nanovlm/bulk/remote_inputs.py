"""Finding and reading images at any URI that pyarrow or fsspec opens: files, folders, tars and parquet files."""

import errno
import fnmatch
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from models.checkpoint import WEIGHTS
from nanovlm.data.formats import record_images
from nanovlm.errors import DataError, ImageError, UsageError
from nanovlm.processing.image_loading import IMAGE_EXTENSIONS, printable, readable_extensions

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

TAR_EXTENSIONS, PARQUET = (".tar", ".tar.gz", ".tgz"), ".parquet"
IMAGE_COLUMNS = ("image", "images", "bytes")
PARQUET_BATCH = 32  # rows read at once
TAR_BUFFER = 2**20
IMAGEFOLDER_TABLE = "metadata.parquet"  # holds captions, no images


@dataclass(frozen=True)
class RemoteFile:
    """A file of a pyarrow file system; uri is its name for people and tables, for a local file its absolute path."""

    filesystem: "FileSystem"
    path: str
    uri: str

    @property
    def is_container(self) -> bool:
        """Whether the file is a tar or parquet file, which holds images."""
        return self.uri.lower().endswith((*TAR_EXTENSIONS, PARQUET))

    def read(self) -> bytes:
        """The content of an image's file. ImageError if it is not a file, OSError if it cannot be read."""
        if self.filesystem.type_name == "local" and os.path.exists(self.path) and not os.path.isfile(self.path):
            raise ImageError("not a file")  # opening a pipe may block forever
        with self.filesystem.open_input_stream(self.path, compression=None) as stream:
            return stream.read()


@dataclass
class RemoteInputs:
    """Files with images, each once, in the order they were named; and what else the names gave."""

    files: list[RemoteFile] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)  # names that gave no file, with the reason
    left_out: Counter[str] = field(default_factory=Counter)  # images that cannot be read here, by extension


def open_filesystem(uri: str) -> tuple["FileSystem", str, str]:
    """The file system of a URI or local path, the path in it, and the prefix that makes a URI of such a path.

    pyarrow opens file://, s3://, gs:// and hdfs:// by itself; other schemes need the package that fsspec names.
    """
    import fsspec
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

    if not is_uri(uri) or uri.startswith("file://"):
        return LocalFileSystem(), os.path.abspath(uri.removeprefix("file://")), ""
    try:
        filesystem, path = FileSystem.from_uri(uri)
    except (ArrowException, OSError) as error:  # another scheme, or characters that are not valid in a URI
        try:
            opened, path = fsspec.core.url_to_fs(uri)
        except (ImportError, ValueError, OSError) as fsspec_error:
            reason = f"{_first_line(error)}; {_first_line(fsspec_error)}"
            raise UsageError(f"{uri}: cannot be opened: {reason}") from None
        filesystem = PyFileSystem(FSSpecHandler(opened))
    return filesystem, path, uri.partition(path.rstrip("/"))[0]


def is_uri(name: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", name) is not None


def find_remote(names: Sequence[str], recursive: bool = True, exclude: str | None = None) -> RemoteInputs:
    """Find the images, tars and parquet files that files, folders and patterns name; a file named twice counts once.

    Hidden files and model folders are left out, as `list_images` does, and what is below exclude, the URI of a folder.
    recursive says whether subfolders are searched, too.
    """
    inputs, known = RemoteInputs(), set()
    for name in names:
        for file in _files_of(name, recursive, inputs):
            if file.uri not in known and not (exclude and file.uri.startswith(f"{exclude}/")):
                known.add(file.uri)
                inputs.files.append(file)
    return inputs


def _files_of(name: str, recursive: bool, inputs: RemoteInputs) -> Iterator[RemoteFile]:
    from pyarrow.fs import FileType

    filesystem, path, prefix = open_filesystem(name)
    try:
        kind = filesystem.get_file_info(path).type
        if kind == FileType.NotFound and re.search(r"[*?[]", path):
            base = path[: re.search(r"[*?[]", path).start()].rpartition("/")[0]  # type: ignore[union-attr]
            names = fnmatch.filter(_walk(filesystem, base, True), path[len(base) :].lstrip("/"))
            names = [match for match in names if "**" in path or match.count("/") == path[len(base) + 1 :].count("/")]
        elif kind == FileType.Directory:
            base, names = path.rstrip("/"), _walk(filesystem, path, recursive)
        elif kind == FileType.NotFound:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        else:
            yield RemoteFile(filesystem, path, prefix + path)
            return
    except OSError as error:
        inputs.missing.append((name, error.strerror or _first_line(error)))
        return
    found = [file for file in _visible(names) if _is_readable(file, inputs.left_out)]
    if not found:
        inputs.missing.append((name, "no images, tars or parquet files there"))
    for file in found:
        yield RemoteFile(filesystem, f"{base}/{file}", f"{prefix}{base}/{file}")


def _walk(filesystem: "FileSystem", folder: str, recursive: bool) -> list[str]:
    """The paths of all files in a folder, relative to it and sorted."""
    from pyarrow.fs import FileSelector, FileType

    if filesystem.type_name == "local":  # os.walk does not follow links to folders, which may be circles
        paths = []
        for current, folders, files in os.walk(folder):
            paths += [os.path.relpath(os.path.join(current, file), folder) for file in files]
            if not recursive:
                folders.clear()
        return sorted(paths)
    infos = filesystem.get_file_info(FileSelector(folder, recursive=recursive))
    start = len(folder.rstrip("/")) + 1
    return sorted(info.path[start:] for info in infos if info.type == FileType.File)


def _visible(paths: Iterable[str]) -> Iterator[str]:
    """Paths without hidden parts and outside of model folders."""
    parsed = [PurePosixPath(path) for path in paths]
    model_folders = {path.parent for path in parsed if path.name == WEIGHTS} - {PurePosixPath(".")}
    for path in parsed:
        if not any(part.startswith(".") for part in path.parts) and model_folders.isdisjoint(path.parents):
            yield str(path)


def _is_readable(path: str, left_out: Counter[str]) -> bool:
    extension = os.path.splitext(path)[1].lower()
    if extension in readable_extensions() or path.lower().endswith((*TAR_EXTENSIONS, PARQUET)):
        return os.path.basename(path) != IMAGEFOLDER_TABLE
    if extension in IMAGE_EXTENSIONS:
        left_out[extension] += 1
    return False


def read_container(file: RemoteFile, skip: Iterable[str] = ()) -> Iterator[tuple[str | None, bytes | Exception]]:
    """Yield the name and content of each image in a tar or parquet file, except those in skip.

    An image is named by its path in the tar, or by its row in the parquet file, from 0, and ".i" if rows hold
    several. An image that cannot be read comes as an error, and None with an error says that the file itself is
    damaged.
    """
    from pyarrow import ArrowException

    members = _tar_members if file.uri.lower().endswith(TAR_EXTENSIONS) else _parquet_members
    seen = set(skip)
    try:
        for name, content in members(file, seen):
            if name not in seen:
                seen.add(name)
                yield name, content
    except (tarfile.TarError, ArrowException, OSError, EOFError, DataError) as error:
        yield None, error if isinstance(error, DataError) else DataError(f"cannot be read: {_first_line(error)}")


def _tar_members(file: RemoteFile, skip: set[str]) -> Iterator[tuple[str, bytes]]:
    with (
        file.filesystem.open_input_stream(file.path, compression=None) as stream,
        tarfile.open(fileobj=stream, mode="r|*", bufsize=TAR_BUFFER) as tar,
    ):
        n_members = 0
        for info in tar:
            n_members += 1
            hidden = any(part.startswith(".") and part != "." for part in info.name.split("/"))
            extension = os.path.splitext(info.name)[1].lower()
            if info.isfile() and not hidden and extension in readable_extensions() and info.name not in skip:
                yield info.name, tar.extractfile(info).read()  # type: ignore[union-attr]
            tar.members.clear()  # type: ignore[attr-defined]  # it would remember every header
        assert tar.fileobj is not None
        if tar.fileobj.tell() <= tar.offset:  # no block of zeros follows the last file
            raise DataError(f"cut after {n_members:,} files; download it again")


def _parquet_members(file: RemoteFile, skip: set[str]) -> Iterator[tuple[str, bytes | Exception]]:
    from pyarrow.parquet import ParquetFile

    with file.filesystem.open_input_file(file.path) as opened, ParquetFile(opened) as table:
        present = table.schema_arrow.names
        column = next((column for column in IMAGE_COLUMNS if column in present), None)
        if column is None:
            raise DataError(f"no column {', '.join(IMAGE_COLUMNS)}, only {', '.join(present)}")
        row = 0
        for batch in table.iter_batches(PARQUET_BATCH, columns=[column]):
            for value in batch.column(0).to_pylist():
                images = record_images({"images": value})
                for i, image in enumerate(images):
                    yield (f"{row}.{i}" if isinstance(value, list) else str(row)), _image_bytes(image)
                row += 1


def _image_bytes(image: Any) -> bytes | Exception:
    """The encoded image in a cell of a table: bytes, or a struct with bytes as the datasets library writes it."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    found = f"names {printable(image)} instead of holding it" if isinstance(image, str) else "holds no image"
    return ImageError(f"the cell {found}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
