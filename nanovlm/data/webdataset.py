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
from urllib.parse import urlsplit

from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.formats import clean_text, record_to_example
from nanovlm.data.remote import list_files, open_errors, stream_errors
from nanovlm.data.source import COLUMN_OPTIONS, INSTALL_DATA, ReadOptions, Source, Stream, first_few
from nanovlm.errors import DataError, MissingExtraError
from nanovlm.processing.image_loading import readable_extensions


@dataclass(frozen=True)
class TarMember:
    """The position of a file inside a tar."""

    tar: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.tar, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


Sample = Mapping[str, TarMember | bytes]  # by lower-case extension; bytes if the tar is streamed


def open_remote_tars(path: str, options: ReadOptions) -> Source | Stream:
    """The examples of tars at an address that fsspec opens: streamed, or downloaded to the cache of `datasets`.

    The address may be a pattern, see `list_files`.
    """
    try:
        from datasets import DownloadConfig, DownloadManager
    except ImportError:
        raise MissingExtraError(f"{path} needs fsspec and the datasets library: {INSTALL_DATA}") from None
    addresses = list_files(path)
    make_example = partial(_sample_to_example, options=options)
    if options.stream:
        with open_errors(addresses[0]):  # the others are opened in their turn
            next(_stream_samples(addresses[0]), None)
        shards = [partial(_read_shard, path, address) for address in addresses]
        return Stream(path, shards, make_example, _has_image, supported_options=[*COLUMN_OPTIONS, "stream"])
    with open_errors(path):
        manager = DownloadManager(download_config=DownloadConfig(disable_tqdm=True))
        files = [str(file) for file in manager.download(addresses)]
    return open_tars(path, files, options, [os.path.basename(urlsplit(address).path) for address in addresses])


def open_tars(path: str, shards: Sequence[str], options: ReadOptions, names: Sequence[str] = ()) -> Source:
    """The examples of all shards; their headers are read now, their contents when an example is encoded.

    names are those of the shards, by default their paths below `path`.
    """
    samples: dict[str, dict[str, TarMember]] = {}
    for shard, name in zip(shards, names or [os.path.relpath(shard, path) for shard in shards]):
        for key, extension, member in _members(shard, name, options.skip_errors):
            samples.setdefault(key, {})[extension] = member
    with_image = {key: sample for key, sample in samples.items() if _has_image(sample)}
    if not with_image:
        raise DataError(f"no images found in {path}, only {len(samples)} samples of other files")
    complete = {key: sample for key, sample in with_image.items() if {"txt", "json"} & sample.keys()}
    if len(complete) < len(with_image) and not options.skip_errors:
        uncaptioned = [key for key in with_image if key not in complete]
        raise DataError(
            f"{len(uncaptioned)} of {len(with_image)} samples in {path} have no .txt or .json: "
            f"{first_few(uncaptioned)}; add them, or leave the samples out with --on-error skip"
        )
    return Source(
        path,
        list(complete.values()),
        partial(_sample_to_example, options=options),
        keys=list(complete),
        named_by_key=True,
        supported_options=COLUMN_OPTIONS,
    )


def _members(shard: str, prefix: str, skip_errors: bool) -> Iterator[tuple[str, str, TarMember]]:
    """Sample key, extension and position of each file in a tar."""
    try:
        with tarfile.open(shard, "r:") as tar:
            for info in tar:
                if info.isfile() and (name := _split_name(info.name)):
                    key = os.path.normpath(os.path.join(prefix, name[0]))
                    yield key, name[1], TarMember(shard, f"{shard}/{info.name}", info.offset_data, info.size)
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


def _read_shard(path: str, address: str) -> Iterator[Sample]:
    """The samples of one shard of a stream."""
    with stream_errors(path):
        yield from _stream_samples(address)


def _stream_samples(address: str) -> Iterator[Sample]:
    """The samples of a remote tar, in which the files of a sample follow each other."""
    import fsspec

    current: str | None = None
    sample: dict[str, bytes] = {}
    # One request for the whole file; servers need not serve ranges of bytes.
    options = {"block_size": 0} if urlsplit(address).scheme in ("http", "https") else {}
    with fsspec.open(address, **options) as file, tarfile.open(fileobj=file, mode="r|") as tar:
        for info in tar:
            name = _split_name(info.name) if info.isfile() else None
            if name is None:
                continue
            if sample and name[0] != current:
                yield sample
                sample = {}
            current, extension = name
            if extension in ("txt", "json") or _is_image(extension):
                sample[extension] = tar.extractfile(info).read()  # type: ignore[union-attr]  # it is a file
        if sample:
            yield sample


def _split_name(path: str) -> tuple[str, str] | None:
    """The sample's key and the lower-case extension in a file's path; None for a hidden file."""
    folder, slash, file = path.rpartition("/")
    stem, _, extension = file.partition(".")
    return (f"{folder}{slash}{stem}", extension.lower()) if stem else None


def _has_image(sample: Sample) -> bool:
    return any(map(_is_image, sample))


def _has_end_marker(tar: tarfile.TarFile) -> bool:
    """Whether a block of zeros follows the last file; tarfile accepts a tar that is cut between two files."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    return tar.fileobj.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)


def _sample_to_example(sample: Sample, name: str, options: ReadOptions) -> Example:
    images = [sample[extension] for extension in sorted(sample) if _is_image(extension)]
    if not {"txt", "json"} & sample.keys():
        raise ExampleError(f"{name} has no .txt or .json")
    try:
        if "txt" in sample:
            return Example(images, [(options.prompt, clean_text(_read(sample["txt"]).decode("utf-8")))], name)
        record = json.loads(_read(sample["json"]))
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON
        raise ExampleError(f"{name}: its text cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise ExampleError(f"{name}: its .json holds {type(record).__name__}, not an object")
    return record_to_example(record | {"images": images}, name, None, options)


def _read(content: TarMember | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read()


def _is_image(extension: str) -> bool:
    return f".{extension.rpartition('.')[2]}" in readable_extensions()
