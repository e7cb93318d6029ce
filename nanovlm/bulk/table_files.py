"""Writing tables as .jsonl, .csv or .parquet; `nanovlm.data.folders.read_table` reads them."""

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovlm.bulk.resume_log import json_line
from nanovlm.data.folders import csv_delimiter


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], like: Path | None = None) -> None:
    """Write rows as .jsonl, .csv or .parquet, by the suffix of path; columns in the order of first use.

    A .parquet file keeps the types and the metadata of `like`, if that exists, a .csv file its byte order mark and
    its delimiter.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        schema = parquet.read_schema(like) if like is not None and like.exists() else pyarrow.schema([])
        types = {field.name: field.type for field in schema}
        cells = {column: [row.get(column) for row in rows] for column in columns}
        table = pyarrow.table({column: _arrow_column(cells[column], types.get(column)) for column in columns})
        parquet.write_table(table.replace_schema_metadata(schema.metadata), path)
    elif path.suffix == ".csv":
        header = like.read_bytes().partition(b"\n")[0] if like is not None and like.exists() else b""
        encoding = "utf-8-sig" if header.startswith(BOM_UTF8) else "utf-8"  # without it, Excel misreads non-ASCII
        with open(path, "w", encoding=encoding, newline="") as file:
            writer = csv.DictWriter(file, columns, delimiter=csv_delimiter(header.decode("utf-8", "replace")))
            writer.writeheader()
            writer.writerows(
                {key: json.dumps(cell) if isinstance(cell, (dict, list)) else cell for key, cell in row.items()}
                for row in rows
            )
    else:
        path.write_bytes(b"".join(map(json_line, rows)))


def _arrow_column(cells: list[Any], kind: Any) -> Any:
    """An Arrow array of this type or, for None, of the cells' own; of JSON where a file could not hold the cells."""
    import pyarrow
    from pyarrow import parquet

    try:
        array = pyarrow.array(cells, kind)
        parquet.write_table(pyarrow.table({"cells": array}), pyarrow.BufferOutputStream())
    except (pyarrow.ArrowException, OverflowError):  # of several types, of large numbers, of an empty object
        return pyarrow.array([None if cell is None else json.dumps(cell) for cell in cells])
    return array
