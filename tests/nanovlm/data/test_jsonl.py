"""Reading JSON lines: errors name the line."""

import json

import pytest

from nanovlm.data.rows import read_jsonl
from nanovlm.errors import DataError

ROWS = [{"file_name": "a.png", "text": "one\u2028two"}, {"file_name": "ü.png", "text": None}]
WRITTEN = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize(
    "content", [WRITTEN, b"\xef\xbb\xbf" + WRITTEN, WRITTEN.replace(b"\n", b"\r\n\n"), WRITTEN[:-1]]
)
def test_reads_one_object_per_line(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert read_jsonl(tmp_path / "rows.jsonl") == ROWS


@pytest.mark.parametrize("end", range(1, len(WRITTEN)))
def test_an_interrupted_write_is_named_by_its_line(tmp_path, end):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(WRITTEN[:end])
    complete = WRITTEN[: end + 1].count(b"}\n")
    if WRITTEN[end - 1 : end + 1] not in (b"}\n", b"\n{"):
        with pytest.raises(DataError, match=f"rows.jsonl, line {complete + 1}, cannot be read"):
            read_jsonl(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{oops\n{"a": 2}\n', "line 2, cannot be read"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "line 2, cannot be read"),
        (b'{"a":' * 100_000 + b"\n", "line 1, cannot be read"),
    ],
)
def test_errors_name_the_line(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_jsonl(tmp_path / "rows.jsonl")
