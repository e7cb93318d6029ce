"""Finding and reading images at any URI that pyarrow or fsspec opens: files, folders, tars and parquet files."""

import glob
import os
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from PIL import Image

from models.checkpoint import WEIGHTS
from nanovlm.bulk.inputs import ImageList, check_file
from nanovlm.data.formats import record_images
from nanovlm.errors import DataError, ImageError, UsageError, first_line
from nanovlm.processing.image_loading import load_image, printable, readable_extensions

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from fsspec.core import OpenFile
    from pyarrow import RecordBatch

TAR_EXTENSIONS, PARQUET = (".tar", ".tar.gz", ".tgz"), ".parquet"
IMAGE_COLUMNS = ("image", "images", "bytes")
IMAGEFOLDER_TABLE = "metadata.parquet"  # holds captions, no images


@dataclass
class RemoteImage:
    """An image in a file, tar or parquet file, and its row's other columns; or the error of a whole tar or parquet."""

    file_name: str  # a URI, or a local file's absolute path
    member: str | None
    content: "OpenFile | bytes | Exception"
    columns: "RecordBatch | None" = None
    result: str | Exception | None = None

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.file_name, self.member)))

    @property
    def row(self) -> Mapping[str, Any]:
        return {} if self.columns is None else self.columns.to_pylist()[0]

    def open(self) -> Image.Image:
        """The image. ImageError if it is none, OSError if its file cannot be read."""
        if isinstance(content := self.content, Exception):
            raise content
        if not isinstance(content, bytes):
            check_file(self.file_name)
            content = content.fs.cat_file(content.path)
        return load_image(content, self.name)


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


def is_container(name: str) -> bool:
    """Whether a file is a tar or parquet file, which holds images."""
    return name.lower().endswith((*TAR_EXTENSIONS, PARQUET))


def find_remote(
    names: Sequence[str | os.PathLike[str]], recursive: bool, exclude: str
) -> tuple[dict[str, "OpenFile"], ImageList]:
    """The images, tars and parquet files that files, folders and patterns name, by URI; and what else the names gave.

    Hidden files and model folders are left out, as `walk` does, and what is below exclude, the URI of a folder.
    recursive says whether subfolders are searched, too.
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
            others.missing.append((name, "no images, tars or parquet files there"))
        files |= {prefix + path: OpenFile(filesystem, path) for path in found}
    return {uri: file for uri, file in files.items() if not uri.startswith(f"{exclude}/")}, others


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
    containers = {file for file in visible if is_container(file.name) and file.name != IMAGEFOLDER_TABLE}
    readable = readable_extensions()
    return [f"{base}/{file}" for file in visible if file in containers or others.takes(file.name, readable)]


def read_images(uri: str, file: "OpenFile", skip: Collection[str | None] = ()) -> Iterator[RemoteImage]:
    """The image of a file, or those of a tar or parquet file without those in skip, each name once.

    A tar or parquet file that is torn ends in an error. Ray Data's read_parquet gives no row numbers to resume by, and
    one torn file ends the run; to its read_webdataset a torn tar is an empty one.
    """
    from pyarrow import ArrowException

    if not is_container(uri):
        yield RemoteImage(uri, None, file)
        return
    seen = set(skip)
    try:
        for member, *content in (_tar_members if uri.lower().endswith(TAR_EXTENSIONS) else _parquet_members)(file):
            if member not in seen:
                seen.add(member)
                yield RemoteImage(uri, member, *content)
        if not seen:
            raise DataError("no images in it; name another file")
    except (tarfile.TarError, ArrowException, OSError, EOFError, DataError) as error:
        is_known = isinstance(error, DataError)
        yield RemoteImage(uri, None, error if is_known else DataError(f"cannot be read: {first_line(error)}"))


def _tar_members(file: "OpenFile") -> Iterator[tuple]:
    with file.fs.open(file.path) as stream, tarfile.open(fileobj=stream, mode="r|*", bufsize=2**20) as tar:
        n_members = 0
        for info in tar:
            n_members += 1
            hidden = any(part.startswith(".") and part != "." for part in info.name.split("/"))
            extension = os.path.splitext(info.name)[1].lower()
            if info.isfile() and not hidden and extension in readable_extensions():
                yield info.name, tar.extractfile(info).read()  # type: ignore[union-attr]
            tar.members.clear()  # type: ignore[attr-defined]  # it would remember every header
        assert tar.fileobj is not None
        if tar.fileobj.tell() <= tar.offset:  # no block of zeros follows the last file
            raise DataError(f"cut after {n_members:,} files; download it again")


def _parquet_members(file: "OpenFile") -> Iterator[tuple]:
    from pyarrow.parquet import ParquetFile

    with file.fs.open(file.path) as opened, ParquetFile(opened) as table:
        present = table.schema_arrow.names
        column = next((column for column in IMAGE_COLUMNS if column in present), None)
        if column is None:
            raise DataError(f"no column {', '.join(IMAGE_COLUMNS)}, only {', '.join(present)}; rename one")
        row = 0
        for batch in table.iter_batches(32):
            others = batch.drop_columns([column])
            for i, value in enumerate(batch.column(column).to_pylist()):
                for k, image in enumerate(record_images({"images": value})):
                    name = f"{row}.{k}" if isinstance(value, list) else str(row)
                    yield name, _image_bytes(image), others.slice(i, 1) if others.num_columns else None
                row += 1


def _image_bytes(image: Any) -> bytes | Exception:
    """The encoded image in a cell of a table: bytes, or a struct with bytes as the datasets library writes it."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    found = f"names {printable(image)} instead of holding it" if isinstance(image, str) else "holds no image"
    return ImageError(f"the cell {found}")
