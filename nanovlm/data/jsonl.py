"""JSON lines: one object a line, in UTF-8."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanovlm.errors import DataError


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; blank lines are skipped. DataError names the file and the line at fault."""
    with reading_errors(path):
        data = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")  # Windows editors write a byte order mark
    lines = data.split(b"\n")
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _parse(line: bytes, position: str) -> dict[str, Any]:
    with reading_errors(f"{position},"):
        value = json.loads(line.decode())
    if not isinstance(value, dict):
        raise DataError(f"{position}, holds {type(value).__name__}, not an object; correct the file")
    return value


@contextmanager
def reading_errors(where: object) -> Iterator[None]:
    """Turn what is raised while a file is read and parsed into a DataError of one line."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # the parsers' errors have no common base: json's, csv's, pyarrow's, RecursionError
        reason = " ".join(str(error).split()).rstrip(".")
        remedy = "correct the file, or write or download it again"
        if isinstance(error, UnicodeDecodeError):  # of a table that Excel wrote as UTF-16, for example
            remedy = "save it as UTF-8"
        raise DataError(f"{where} cannot be read: {reason}; {remedy}") from None
