"""A folder of shards, .parquet or .jsonl files of captions, on any file system that pyarrow or fsspec opens.

Row: file_name, the path or URI of an image, tar or parquet file; member, the image's name in a tar or its row in a
parquet file, else null; text; and the other columns of a parquet file. A worker writes a shard once, whole, and before
it the shard's failures to failures/NAME.jsonl, so that no interruption loses them. A finished run moves those to
failures.jsonl. Images in shards are done, so a folder that has grown since is captioned on.

Ray Data's write_parquet writes under the final name, so that a kill leaves a torn file on a disk; its checkpoints
(2.60) count rows that failed as done, and filter after the read, so that a resumed run reads every image again.
"""

import json
import re
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanovlm.bulk.remote_inputs import open_filesystem
from nanovlm.bulk.resume_log import FAILURES, json_line
from nanovlm.errors import OutputError, UsageError

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table

FORMATS = ("parquet", "jsonl")
SETTINGS = "run.json"
SHARD = re.compile(r"shard-(\d+)\.(parquet|jsonl)")
ATOMIC_STORES = ("s3", "gcs")  # an object appears there when it is complete; a rename would be a copy

Row = Mapping[str, Any]
Key = tuple[str, str | None]  # file_name and member of an image; (file_name, None) of a file


@dataclass
class ShardState:
    """Images that are done, those that have failed, and the number of the next shard."""

    done: dict[str, set[str | None]] = field(default_factory=lambda: defaultdict(set))  # members by file_name
    failed: dict[Key, str] = field(default_factory=dict)  # the reason of each failure that no caption has followed
    n_shards: int = 0


class ShardFolder:
    """The output folder of a run on several machines; each worker opens its own."""

    def __init__(self, uri: str, format: str = "parquet"):
        if format not in FORMATS:
            raise UsageError(f"shard format {format!r} is none of {', '.join(FORMATS)}")
        self.format = format
        self.filesystem, path, prefix = open_filesystem(uri)
        self.path = path.rstrip("/")
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
        data = self._read(SETTINGS)
        if not data:
            return self.write(SETTINGS, json.dumps(settings, indent=1).encode())
        stored = json.loads(data)
        names = [name for name in settings if stored.get(name) != settings[name]]
        if names:
            changes = ", ".join(f"{name} {stored.get(name)!r}, not {settings[name]!r}" for name in names)
            raise UsageError(f"{self.uri} holds captions of another run: {changes}; name another folder")
        return None

    def read_state(self) -> ShardState:
        """The state that all shards and lists of failures give. UsageError if a shard cannot be read."""
        state = ShardState()
        shards = [name for name in self._names("") if SHARD.fullmatch(name)]
        parts = [f"failures/{name}" for name in self._names("failures")]
        for file_name, member in (key for name in shards for key in self._read_keys(name)):
            state.done[file_name].add(member)
        for row in (json.loads(line) for name in (FAILURES, *parts) for line in self._read(name).splitlines()):
            key = row["file_name"], row.get("member")
            if key[1] not in state.done.get(key[0], ()):
                state.failed[key] = row["reason"]
        numbers = [int(match[1]) for name in (*shards, *parts) if (match := SHARD.search(name))]
        state.n_shards = max(numbers, default=-1) + 1
        return state

    def write_shard(
        self, name: str, rows: Sequence[Row], failures: Sequence[Row], columns: "Sequence[RecordBatch]" = ()
    ) -> None:
        """Write failures and captions, in this order; doing it again replaces both.

        columns, if given, are one row of other columns for each row of captions.
        """
        self._write_or_delete(f"failures/{name}.jsonl", b"".join(map(json_line, failures)))
        if rows:
            self.write(f"{name}.{self.format}", self._encode(rows, columns))

    def write_failures(self, failures: Iterable[Row]) -> bool:
        """Write the table of all failures in place of its parts; returns whether there are any."""
        data = b"".join(map(json_line, failures))
        self._write_or_delete(FAILURES, data)
        with suppress(FileNotFoundError):
            self.filesystem.delete_dir(f"{self.path}/failures")
        return bool(data)

    def write(self, name: str, data: bytes) -> None:
        """Write a file so that it is never seen in parts. OutputError if that is not possible."""
        folder, _, file = f"{self.path}/{name}".rpartition("/")
        is_atomic = self.filesystem.type_name in ATOMIC_STORES
        new = f"{folder}/{file}" if is_atomic else f"{folder}/.{file}.{uuid.uuid4().hex}"
        try:
            if not is_atomic:
                self.filesystem.create_dir(folder, recursive=True)
            with self.filesystem.open_output_stream(new, compression=None) as stream:
                stream.write(data)
            if not is_atomic:
                self.filesystem.move(new, f"{folder}/{file}")
        except OSError as error:
            if not is_atomic:
                with suppress(OSError):
                    self.filesystem.delete_file(new)
            raise OutputError(f"{self.uri}/{name}: {error}; run the same command to resume") from error

    def _write_or_delete(self, name: str, data: bytes) -> None:
        if data:
            return self.write(name, data)
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(f"{self.path}/{name}")
        return None

    def _encode(self, rows: Sequence[Row], columns: "Sequence[RecordBatch]") -> bytes:
        import pyarrow
        from pyarrow.parquet import write_table

        schema = pyarrow.schema([(name, pyarrow.string()) for name in ("file_name", "member", "text")])
        table: Table = pyarrow.Table.from_pylist([dict(row) for row in rows], schema)
        others = pyarrow.Table.from_batches(columns) if columns else pyarrow.table({})
        for name in others.column_names:
            new_name = f"input_{name}" if name in schema.names else name
            table = table.append_column(new_name, others[name])
        if self.format == "jsonl":
            return b"".join(map(json_line, table.to_pylist()))
        write_table(table, sink := pyarrow.BufferOutputStream())
        return sink.getvalue().to_pybytes()

    def _read_keys(self, name: str) -> list[Key]:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table

        try:
            if name.endswith(".jsonl"):
                rows = [json.loads(line) for line in self._read(name).splitlines()]
                return [(row["file_name"], row.get("member")) for row in rows]
            columns = ["file_name", "member"]
            table = read_table(f"{self.path}/{name}", columns=columns, filesystem=self.filesystem, partitioning=None)
            return list(zip(*(table[column].to_pylist() for column in columns)))
        except (ArrowException, ValueError, KeyError, TypeError, OSError) as error:
            raise UsageError(f"{self.uri}/{name} is not a shard of captions: {error}; move it away") from None

    def _read(self, name: str) -> bytes:
        """The content of a file in the folder; empty if there is none."""
        try:
            with self.filesystem.open_input_stream(f"{self.path}/{name}", compression=None) as stream:
                return stream.read()
        except FileNotFoundError:
            return b""

    def _names(self, subfolder: str) -> list[str]:
        """The names of the files directly in a subfolder that are not hidden, sorted."""
        from pyarrow.fs import FileSelector

        infos = self.filesystem.get_file_info(
            FileSelector(f"{self.path}/{subfolder}".rstrip("/"), allow_not_found=True)
        )
        return sorted(info.base_name for info in infos if info.is_file and not info.base_name.startswith("."))
