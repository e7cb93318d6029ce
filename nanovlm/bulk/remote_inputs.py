"""Finding and reading images at any URI that pyarrow or fsspec opens: files, folders, tars and parquet files."""

import errno
import fnmatch
import os
import re
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from models.checkpoint import WEIGHTS
from nanovlm.data.formats import record_images
from nanovlm.data.remote import first_line
from nanovlm.errors import DataError, ImageError, UsageError
from nanovlm.processing.image_loading import IMAGE_EXTENSIONS, printable, readable_extensions

if TYPE_CHECKING:
    from pyarrow import RecordBatch
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


@dataclass(frozen=True)
class Member:
    """An image in a tar or parquet file, and its row's other columns; without a name, the error of the whole file."""

    name: str | None
    content: bytes | Exception
    columns: "RecordBatch | None" = None


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
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, LocalFileSystem

    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", uri) or uri.startswith("file://"):
        return LocalFileSystem(), os.path.abspath(uri.removeprefix("file://")), ""
    try:
        filesystem, path = FileSystem.from_uri(uri)
    except (ArrowException, OSError) as error:  # another scheme, or characters that are not valid in a URI
        try:
            filesystem, path = FileSystem.from_uri(f"fsspec+{uri}")
        except (ImportError, ValueError, OSError) as fsspec_error:
            reason = f"{first_line(error)}; {first_line(fsspec_error)}"
            raise UsageError(f"{uri}: cannot be opened: {reason}") from None
    return filesystem, path, uri.partition(path.rstrip("/"))[0]


def find_remote(names: Sequence[str], recursive: bool = True, exclude: str | None = None) -> RemoteInputs:
    """Find the images, tars and parquet files that files, folders and patterns name; a file named twice counts once.

    Hidden files and model folders are left out, as `list_images` does, and what is below exclude, the URI of a folder.
    recursive says whether subfolders are searched, too.
    """
    inputs, known = RemoteInputs(), set()
    for name in names:
        filesystem, path, prefix = open_filesystem(name)
        try:
            paths = _expand(filesystem, path, recursive, inputs.left_out)
        except OSError as error:
            inputs.missing.append((name, error.strerror or first_line(error)))
            continue
        if not paths:
            inputs.missing.append((name, "no images, tars or parquet files there"))
        for uri, path in ((prefix + path, path) for path in paths):
            if uri not in known and not (exclude and uri.startswith(f"{exclude}/")):
                known.add(uri)
                inputs.files.append(RemoteFile(filesystem, path, uri))
    return inputs


def _expand(filesystem: "FileSystem", path: str, recursive: bool, left_out: Counter[str]) -> list[str]:
    """The files that a file, folder or pattern stands for. OSError if there is no such thing."""
    from pyarrow.fs import FileType

    kind, magic = filesystem.get_file_info(path).type, re.search(r"[*?[]", path)
    if kind == FileType.Directory:
        base = path.rstrip("/")
        found = _walk(filesystem, base, recursive)
    elif kind != FileType.NotFound:
        return [path]
    elif magic:
        base = path[: magic.start()].rpartition("/")[0]
        pattern = path[len(base) + 1 :]
        found = fnmatch.filter(_walk(filesystem, base, recursive=True), pattern)
        found = [file for file in found if "**" in pattern or file.count("/") == pattern.count("/")]
    else:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    parsed = [PurePosixPath(file) for file in found]
    model_folders = {file.parent for file in parsed if file.name == WEIGHTS} - {PurePosixPath(".")}
    hidden = {file for file in parsed if any(part.startswith(".") for part in file.parts)}
    visible = [file for file in parsed if file not in hidden and model_folders.isdisjoint(file.parents)]
    return [f"{base}/{file}" for file in visible if _is_readable(file, left_out)]


def _walk(filesystem: "FileSystem", folder: str, recursive: bool) -> list[str]:
    """The paths of all files in a folder, relative to it and sorted."""
    from pyarrow.fs import FileSelector, FileType

    if filesystem.type_name == "local":  # os.walk does not follow links to folders, which may be circles
        walked = os.walk(folder) if recursive else [next(os.walk(folder))]
        return sorted(
            os.path.relpath(os.path.join(current, file), folder) for current, _, files in walked for file in files
        )
    infos = filesystem.get_file_info(FileSelector(folder, recursive=recursive))
    return sorted(info.path[len(folder) + 1 :] for info in infos if info.type == FileType.File)


def _is_readable(path: PurePosixPath, left_out: Counter[str]) -> bool:
    extension = path.suffix.lower()
    if extension in readable_extensions() or path.name.lower().endswith((*TAR_EXTENSIONS, PARQUET)):
        return path.name != IMAGEFOLDER_TABLE
    if extension in IMAGE_EXTENSIONS:
        left_out[extension] += 1
    return False


def read_container(file: RemoteFile, skip: Collection[str | None] = ()) -> Iterator[Member]:
    """Yield each image in a tar or parquet file, except those in skip.

    An image is named by its path in the tar, or by its row in the parquet file, from 0, and ".i" if rows hold
    several. If the file itself is damaged, its error comes last.

    Ray Data 2.60 has readers, too, which lose promises that are kept here: one missing file of read_binary_files, or
    one torn file of read_parquet, ends the run; read_webdataset takes a torn tar for an empty one.
    """
    from pyarrow import ArrowException

    members = _tar_members if file.uri.lower().endswith(TAR_EXTENSIONS) else _parquet_members
    seen: set[str | None] = set(skip)
    try:
        for member in members(file, seen):
            if member.name not in seen:
                seen.add(member.name)
                yield member
    except (tarfile.TarError, ArrowException, OSError, EOFError, DataError) as error:
        is_known = isinstance(error, DataError)
        yield Member(None, error if is_known else DataError(f"cannot be read: {first_line(error)}"))


def _tar_members(file: RemoteFile, skip: Collection[str | None]) -> Iterator[Member]:
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
                yield Member(info.name, tar.extractfile(info).read())  # type: ignore[union-attr]
            tar.members.clear()  # type: ignore[attr-defined]  # it would remember every header
        assert tar.fileobj is not None
        if tar.fileobj.tell() <= tar.offset:  # no block of zeros follows the last file
            raise DataError(f"cut after {n_members:,} files; download it again")


def _parquet_members(file: RemoteFile, skip: Collection[str | None]) -> Iterator[Member]:
    from pyarrow.parquet import ParquetFile

    with file.filesystem.open_input_file(file.path) as opened, ParquetFile(opened) as table:
        present = table.schema_arrow.names
        column = next((column for column in IMAGE_COLUMNS if column in present), None)
        if column is None:
            raise DataError(f"no column {', '.join(IMAGE_COLUMNS)}, only {', '.join(present)}")
        row = 0
        for batch in table.iter_batches(PARQUET_BATCH):
            others = batch.drop_columns([column])
            for i, value in enumerate(batch.column(column).to_pylist()):
                for k, image in enumerate(record_images({"images": value})):
                    name = f"{row}.{k}" if isinstance(value, list) else str(row)
                    yield Member(name, _image_bytes(image), others.slice(i, 1))
                row += 1


def _image_bytes(image: Any) -> bytes | Exception:
    """The encoded image in a cell of a table: bytes, or a struct with bytes as the datasets library writes it."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    found = f"names {printable(image)} instead of holding it" if isinstance(image, str) else "holds no image"
    return ImageError(f"the cell {found}")
