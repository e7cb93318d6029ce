"""A folder of shards, .parquet or .jsonl files of captions, on any file system that pyarrow or fsspec opens.

Row: file_name, the path or URI of an image, tar or parquet file; member, the image's name in a tar or its row in a
parquet file, else null; text. A shard is written once, whole, by whoever captioned it. What its images failed of is
written before it, to failures/NAME.jsonl, so that no interruption loses it; a finished run moves that to
failures.jsonl. What is done is what the shards hold, so a folder that has grown since is captioned on.
"""

import json
import re
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nanovlm.bulk.remote_inputs import open_filesystem
from nanovlm.bulk.resume_log import FAILURES, json_line
from nanovlm.errors import OutputError, UsageError

FORMATS = ("parquet", "jsonl")
SETTINGS = "run.json"
SHARD = re.compile(r"shard-(\d+)\.(parquet|jsonl)")
ATOMIC_STORES = ("s3", "gcs")  # an object appears there when it is complete; a rename would be a copy

Row = Mapping[str, Any]
Key = tuple[str, str | None]  # file_name and member of an image; (file_name, None) of a file


@dataclass(frozen=True)
class ShardState:
    """What the shards of a folder hold."""

    done: dict[str, set[str | None]] = field(default_factory=lambda: defaultdict(set))  # members by file_name
    failed: dict[Key, str] = field(default_factory=dict)  # the reason of each failure that no caption has followed
    n_shards: int = 0  # the number of the next shard


class ShardFolder:
    """The output folder of a run on several machines; each worker opens its own."""

    def __init__(self, uri: str, format: str = "parquet"):
        if format not in FORMATS:
            raise UsageError(f"shard format {format!r} is none of {', '.join(FORMATS)}")
        self.format = format
        self.filesystem, self.path, prefix = open_filesystem(uri)
        self.path = self.path.rstrip("/")
        self.uri = prefix + self.path

    @property
    def is_local(self) -> bool:
        return self.filesystem.type_name == "local"

    def create(self) -> None:
        """Make the folder. UsageError if that is not possible."""
        try:
            self.filesystem.create_dir(self.path, recursive=True)
        except OSError as error:
            raise UsageError(f"{self.uri}: the folder cannot be made: {error.strerror or error}") from None

    def check_settings(self, settings: Mapping[str, str]) -> None:
        """Write down the settings of a first run. UsageError if the folder holds captions of other settings."""
        if (data := self._read(SETTINGS)) is None:
            return self.write(SETTINGS, json.dumps(settings, indent=1).encode())
        stored = json.loads(data)
        names = [name for name in settings if stored.get(name) != settings[name]]
        if names:
            changes = ", ".join(f"{name} {stored.get(name)!r}, not {settings[name]!r}" for name in names)
            raise UsageError(f"{self.uri} holds captions of another run: {changes}; name another folder")
        return None

    def read_state(self) -> ShardState:
        """What is done and what has failed, from all shards. UsageError if one cannot be read."""
        state = ShardState()
        numbers = [-1]
        for name in self._names(""):
            if match := SHARD.fullmatch(name):
                numbers.append(int(match[1]))
                for file_name, member in self._read_keys(name):
                    state.done[file_name].add(member)
        parts = [f"failures/{name}" for name in self._names("failures")]
        numbers += [int(match[1]) for part in parts if (match := SHARD.search(part))]
        for row in self._read_failures([FAILURES, *parts]):
            key = row["file_name"], row.get("member")
            if key[1] not in state.done.get(key[0], ()):
                state.failed[key] = row["reason"]
        return ShardState(state.done, state.failed, max(numbers) + 1)

    def write_shard(self, name: str, rows: Sequence[Row], failures: Sequence[Row]) -> None:
        """Write what failed and what was captioned, in this order; doing it again replaces both."""
        part = f"failures/{name}.jsonl"
        if failures:
            self.write(part, b"".join(map(json_line, failures)))
        else:
            self._delete(part)  # of an earlier attempt at this shard
        if rows:
            self.write(f"{name}.{self.format}", self._encode(rows))
        self._delete(f"attempts/{name}")

    def count_attempt(self, name: str) -> int:
        """Count that a worker begins a shard; returns how many times one has since the run began."""
        attempts = int(self._read(f"attempts/{name}") or 0) + 1
        self.write(f"attempts/{name}", str(attempts).encode())
        return attempts

    def forget_attempts(self) -> None:
        """Count again, at the start and the end of a run."""
        self._delete_folder("attempts")

    def write_failures(self, failures: Iterable[Row]) -> bool:
        """Write the table of all failures in place of its parts; returns whether there are any."""
        data = b"".join(map(json_line, failures))
        if data:
            self.write(FAILURES, data)
        else:
            self._delete(FAILURES)
        self._delete_folder("failures")
        return bool(data)

    def write(self, name: str, data: bytes) -> None:
        """Write a file so that it is never seen in parts. OutputError if that is not possible."""
        path = f"{self.path}/{name}"
        folder, _, file = path.rpartition("/")
        is_atomic = self.filesystem.type_name in ATOMIC_STORES
        new = path if is_atomic else f"{folder}/.{file}.{uuid.uuid4().hex}"
        try:
            if not is_atomic:
                self.filesystem.create_dir(folder, recursive=True)
            with self.filesystem.open_output_stream(new, compression=None) as stream:
                stream.write(data)
            if not is_atomic:
                self.filesystem.move(new, path)
        except OSError as error:
            if not is_atomic:
                with suppress(OSError):
                    self.filesystem.delete_file(new)
            raise OutputError(f"{self.uri}/{name}: {error}; run the same command to resume") from error

    def _encode(self, rows: Sequence[Row]) -> bytes:
        if self.format == "jsonl":
            return b"".join(map(json_line, rows))
        import pyarrow
        from pyarrow.parquet import write_table

        schema = pyarrow.schema([(name, pyarrow.string()) for name in ("file_name", "member", "text")])
        write_table(
            pyarrow.Table.from_pylist([dict(row) for row in rows], schema), sink := pyarrow.BufferOutputStream()
        )
        return sink.getvalue().to_pybytes()

    def _read_keys(self, name: str) -> list[Key]:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table

        try:
            if name.endswith(".jsonl"):
                rows = [json.loads(line) for line in (self._read(name) or b"").splitlines()]
                return [(row["file_name"], row.get("member")) for row in rows]
            columns = ["file_name", "member"]
            table = read_table(f"{self.path}/{name}", columns=columns, filesystem=self.filesystem, partitioning=None)
            return list(zip(*(table[column].to_pylist() for column in columns)))
        except (ArrowException, ValueError, KeyError, TypeError, OSError) as error:
            raise UsageError(f"{self.uri}/{name} is not a shard of captions: {error}; move it away") from None

    def _read_failures(self, names: Iterable[str]) -> list[dict[str, Any]]:
        return [json.loads(line) for name in names for line in (self._read(name) or b"").splitlines()]

    def _read(self, name: str) -> bytes | None:
        """The content of a file in the folder; None if there is none."""
        try:
            with self.filesystem.open_input_stream(f"{self.path}/{name}", compression=None) as stream:
                return stream.read()
        except FileNotFoundError:
            return None

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(f"{self.path}/{name}")

    def _delete_folder(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.filesystem.delete_dir(f"{self.path}/{name}")

    def _names(self, subfolder: str) -> list[str]:
        """The names of the files directly in a subfolder that are not hidden, sorted."""
        from pyarrow.fs import FileSelector, FileType

        selector = FileSelector(f"{self.path}/{subfolder}".rstrip("/"), allow_not_found=True)
        infos = self.filesystem.get_file_info(selector)
        return sorted(
            info.base_name for info in infos if info.type == FileType.File and not info.base_name.startswith(".")
        )
