"""webdataset tars: files that share a name up to its first dot are one example."""

import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.formats import record_example, words
from nanovlm.data.source import COLUMNS, EXTENSIONS, ReadOptions, Source
from nanovlm.errors import DataError


@dataclass(frozen=True)
class Member:
    """A file inside a tar: where its bytes are."""

    tar: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.tar, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def tars(path: str, shards: Sequence[str], reading: ReadOptions) -> Source:
    """The examples of all shards, which are read through once for their index."""
    samples: dict[str, dict[str, Member]] = {}
    for shard in shards:
        try:
            with tarfile.open(shard, "r:") as tar:
                for info in tar:
                    folder, _, file = info.name.rpartition("/")
                    stem, _, suffix = file.partition(".")
                    if info.isfile() and stem:
                        key = os.path.normpath(os.path.join(os.path.relpath(shard, path), folder, stem))
                        member = Member(shard, f"{shard}/{info.name}", info.offset_data, info.size)
                        samples.setdefault(key, {})[suffix.lower()] = member
                tar.fileobj.seek(tar.offset)  # tarfile ends as gladly where a download broke off between two files
                if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE) and not reading.skip:
                    raise DataError(
                        f"{shard} is cut after {len(tar.getmembers()):,} files; download it again, or learn from those "
                        "by --on-bad-example skip"
                    )
        except (tarfile.TarError, OSError) as error:
            raise DataError(
                f"{shard} is no tar that can be read at any place, it may be packed or cut: {error}; unpack it, or "
                "download it again"
            ) from None
    pictured = {key: sample for key, sample in samples.items() if any(map(_is_picture, sample))}
    if not pictured:
        raise DataError(f"no pictures found in {path}, only {len(samples)} samples of other files")
    silent = [key for key, sample in pictured.items() if not {"txt", "json"} & sample.keys()]
    if silent and not reading.skip:
        raise DataError(
            f"{len(silent)} of {len(pictured)} samples in {path} have no .txt or .json: {', '.join(silent[:3])}"
            f"{' ...' * (len(silent) > 3)}; add them, or leave the samples out by --on-bad-example skip"
        )
    spoken = {key: sample for key, sample in pictured.items() if key not in set(silent)}
    example = partial(tar_example, reading=reading)
    return Source(path, list(spoken.values()), example, list(spoken), named_by_key=True, obeys=COLUMNS)


def tar_example(sample: dict[str, Member], name: str, reading: ReadOptions) -> Example:
    pictures = [sample[suffix] for suffix in sorted(sample) if _is_picture(suffix)]
    try:
        if "txt" in sample:
            return Example(pictures, [(reading.prompt, words(sample["txt"].read().decode("utf-8")))], name)
        record = json.loads(sample["json"].read())
    except ValueError as error:
        raise ExampleError(f"{name}: its text cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise ExampleError(f"{name}: its .json holds {type(record).__name__}, not an object")
    return record_example(record | {"images": pictures}, name, None, reading)


def _is_picture(suffix: str) -> bool:
    return f".{suffix.rpartition('.')[2]}" in EXTENSIONS
