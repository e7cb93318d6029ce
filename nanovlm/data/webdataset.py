"""webdataset tars: files that share a name up to its first dot are one example.

The `datasets` library can read webdataset, too, but loses promises that are kept here (checked with datasets 5.2.0). It
copies every byte into an Arrow cache: 1.6 s and 200 MB of disk for a tar of 200 MB, whose index takes 0.03 s here. It
refuses a shard whose first samples mix .png and .jpg or lack a caption, drops images of a type that comes later, fails
at a broken .json without naming it, and does not notice a tar that is cut between two files.
"""

import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any
from urllib.parse import urlsplit

from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.formats import COLUMN_OPTIONS, clean_text, record_to_example
from nanovlm.data.remote import INSTALL_DATA, list_files, remote_errors
from nanovlm.data.source import Source, Stream, captioned_source
from nanovlm.errors import DataError, MissingExtraError
from nanovlm.options import ReadOptions
from nanovlm.processing.image_loading import readable_extensions


@dataclass(frozen=True)
class FilePart:
    """Some bytes of a file, such as a member of a tar; by default all."""

    path: str
    name: str = ""
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


Sample = Mapping[str, Any]  # by lower-case extension: a FilePart, an image's path or, if the tar is streamed, bytes


def open_remote_tars(path: str, options: ReadOptions) -> Source | Stream:
    """The examples of tars at an address that fsspec opens: streamed, or downloaded to the cache of `datasets`.

    The address may be a pattern, see `list_files`.
    """
    try:
        from datasets import DownloadConfig, DownloadManager
    except ImportError:
        raise MissingExtraError(f"{path} needs fsspec and the datasets library: {INSTALL_DATA}") from None
    addresses = list_files(path)
    if options.stream:
        with remote_errors(addresses[0]):  # the others are opened in their turn
            next(_stream_samples(addresses[0]), None)
        shards = [partial(_stream_samples, address) for address in addresses]
        make_example = partial(sample_to_example, options=options)
        return Stream(path, shards, make_example, [*COLUMN_OPTIONS, "stream"])
    with remote_errors(path):
        manager = DownloadManager(download_config=DownloadConfig(disable_tqdm=True))
        files = [str(file) for file in manager.download(addresses)]
    return open_tars(path, files, options, [os.path.basename(urlsplit(address).path) for address in addresses])


def open_tars(path: str, shards: Sequence[str], options: ReadOptions, names: Sequence[str] = ()) -> Source:
    """The examples of all shards; their headers are read now, their contents when an example is encoded.

    names are those of the shards, by default their paths below `path`.
    """
    samples: dict[str, dict[str, FilePart]] = {}
    for shard, name in zip(shards, names or [os.path.relpath(shard, path) for shard in shards]):
        for key, extension, part in _index(shard, options.skip_errors):
            samples.setdefault(os.path.normpath(os.path.join(name, key)), {})[extension] = part
    with_image = {key: sample for key, sample in samples.items() if _has_image(sample)}
    if not with_image:
        raise DataError(f"no images found in {path}, only {len(samples)} samples of other files; name another path")
    make_example = partial(sample_to_example, options=options)
    return captioned_source(path, with_image, _has_text, ".txt or .json", make_example, options, COLUMN_OPTIONS)


def _index(shard: str, skip_errors: bool) -> Iterator[tuple[str, str, FilePart]]:
    """Sample key, extension and position of each file in a tar."""
    try:
        with tarfile.open(shard, "r:") as tar:
            for key, extension, info in _files(tar):
                yield key, extension, FilePart(shard, f"{shard}/{info.name}", info.offset_data, info.size)
            if not skip_errors and not _has_end_marker(tar):
                raise DataError(
                    f"{shard} is cut after {len(tar.getmembers()):,} files; download it again, or learn from those "
                    "with --on-error skip"
                )
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"{shard} is no tar that can be read at any position, it may be compressed or cut: {error}; unpack it, or "
            "download it again"
        ) from None


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Sample key, lower-case extension and header of each file that is not hidden."""
    for info in tar:
        folder, slash, file = info.name.rpartition("/")
        stem, _, extension = file.partition(".")
        if info.isfile() and stem:
            yield f"{folder}{slash}{stem}", extension.lower(), info


def _has_end_marker(tar: tarfile.TarFile) -> bool:
    """Whether a block of zeros follows the last file; tarfile accepts a tar that is cut between two files."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    return tar.fileobj.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)


def _stream_samples(address: str) -> Iterator[Sample]:
    """The samples of a remote tar, in which the files of a sample follow each other."""
    import fsspec

    # One request for the whole file; servers need not serve ranges of bytes.
    options = {"block_size": 0} if urlsplit(address).scheme in ("http", "https") else {}
    with fsspec.open(address, **options) as file, tarfile.open(fileobj=file, mode="r|") as tar:
        for _, files in groupby(_files(tar), itemgetter(0)):
            sample = {
                extension: tar.extractfile(info).read()  # type: ignore[union-attr]  # it is a file
                for _, extension, info in files
                if extension in ("txt", "json") or _is_image(extension)
            }
            if _has_image(sample):
                yield sample


def _has_image(sample: Sample) -> bool:
    return any(map(_is_image, sample))


def _is_image(extension: str) -> bool:
    return f".{extension.rpartition('.')[2]}" in readable_extensions()


def _has_text(sample: Sample) -> bool:
    return not {"txt", "json"}.isdisjoint(sample)


def sample_to_example(sample: Sample, name: str, options: ReadOptions) -> Example:
    """The example of a sample's images and its caption in a .txt or its record in a .json."""
    if not _has_text(sample):
        raise ExampleError(f"{name} has no .txt or .json; write one")
    images = [sample[extension] for extension in sorted(sample) if _is_image(extension)]
    try:
        content = sample.get("txt", sample.get("json"))
        data = content.read() if isinstance(content, FilePart) else content
        text = data.decode("utf-8-sig")  # Windows editors write a byte order mark
        if "txt" in sample:
            return Example(images, [(options.prompt, clean_text(text))], name)
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise ExampleError(f"{name}: its text is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON
        raise ExampleError(f"{name}: its text cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise ExampleError(f"{name}: its .json holds {type(record).__name__}, not an object")
    return record_to_example(record | {"images": images}, name, None, options)
