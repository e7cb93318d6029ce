"""The output folder of captions on a cluster: files of rows, each written whole, so that none is seen in parts."""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Sequence

from nanovlm.bulk.outputs import json_line
from nanovlm.bulk.remote_inputs import RemoteImage, open_filesystem
from nanovlm.errors import OutputError, UsageError

COLUMNS = ("file_name", "member", "text")

Done = dict[str, set[str | None]]  # members by file name; None stands for a file of one image


class ShardFolder:
    """The output folder: .parquet or .jsonl files of rows with file_name, member, text and an input's other columns."""

    def __init__(self, uri: str, format: str = "parquet"):
        self.format = format
        self.filesystem, path, prefix = open_filesystem(uri)
        self.path = path.rstrip("/")
        self.uri, self.is_local = prefix + self.path, not prefix

    def create(self) -> None:
        """Make the folder. UsageError if that is not possible."""
        try:
            self.filesystem.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.uri}: the folder cannot be made: {error.strerror or error}") from None

    def done(self) -> Done:
        """The members by file_name that shards hold. UsageError if a shard cannot be read."""
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table

        done: Done = {}
        for path in self.filesystem.ls(self.path, detail=False):
            if not os.path.basename(path).startswith("shard-"):
                continue
            try:
                with self.filesystem.open(path) as file:
                    is_jsonl, columns = path.endswith(".jsonl"), ["file_name", "member"]
                    rows = map(json.loads, file) if is_jsonl else read_table(file, columns=columns).to_pylist()
                    for row in rows:
                        done.setdefault(row["file_name"], set()).add(row.get("member"))
            except (ArrowException, ValueError, KeyError, AttributeError, TypeError, OSError) as error:
                raise UsageError(f"{path} is not a shard of captions: {error}; move it away") from None
        return done

    def write_shard(self, group: Sequence[str], images: Sequence[RemoteImage], decorate: Callable[[str], str]) -> None:
        """Write the captions of images into a file that is named by their group: doing it again replaces it."""
        import pyarrow
        from pyarrow.parquet import write_table

        rows = [{"file_name": i.file_name, "member": i.member, "text": decorate(str(i.result))} for i in images]
        table = pyarrow.Table.from_pylist(rows, pyarrow.schema([(name, pyarrow.string()) for name in COLUMNS]))
        columns = [image.columns for image in images if image.columns is not None]
        others = pyarrow.Table.from_batches(columns) if columns else pyarrow.table({})
        for name in others.column_names:
            table = table.append_column(f"input_{name}" if name in COLUMNS else name, others[name])
        write_table(table, sink := pyarrow.BufferOutputStream())
        data = b"".join(map(json_line, table.to_pylist())) if self.format == "jsonl" else sink.getvalue().to_pybytes()
        number = hashlib.sha256("\n".join(group).encode(errors="surrogateescape")).hexdigest()[:16]
        self.write(f"shard-{number}.{self.format}", data if rows else b"")

    def write(self, name: str, data: bytes) -> None:
        """Write a file so that it is never seen in parts, or delete it if it would be empty. OutputError if not."""
        path, new = f"{self.path}/{name}", f"{self.path}/.{name}.{uuid.uuid4().hex}"
        try:
            if data:
                self.filesystem.pipe_file(new, data)
                self.filesystem.mv(new, path)
            elif self.filesystem.exists(path):
                self.filesystem.rm_file(path)
        except OSError as error:
            raise OutputError(f"{self.uri}/{name}: {error}; run the same command to resume") from error
