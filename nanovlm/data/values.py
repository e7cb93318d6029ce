"""Values of a row: each type of JSON, CSV, Arrow and `datasets` becomes text, or is refused by its name."""

import datetime
import decimal
import json
import re
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from models.common import files
from models.common.errors import FileError
from nanovlm.data.examples import ExampleError

# Texts that tools write for a missing value: pandas, numpy and C, MySQL, Excel's errors
MISSING = {
    "nan", "NaN", "NAN", "-nan", "-NaN", "<NA>", "NaT", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN", "\\N",
    "#N/A", "#NA", "#NULL!", "#REF!", "#VALUE!", "#DIV/0!", "#NAME?", "#NUM!",
}  # fmt: skip
# Texts that also mean something, such as the answer None; missing in a .csv, which has no other way to say so
MISSING_IN_CSV = {"NA", "N/A", "n/a", "#N/A N/A", "None", "NULL", "null", "(null)", "undefined"}
HUB_FILE = re.compile(r"(zip://[^:]*::)?hf://")  # as `datasets` names a file of a stream
SHORT_FLOATS = ("halffloat", "float")  # Arrow's names of floats of 16 and 32 bits


def plain_value(value: Any, kind: Any, feature: Any = None) -> Any:
    """Convert a value of Arrow's `to_pylist`, of Arrow's type kind and `datasets`' feature, to what JSON would hold.

    Numbers of a class become its name, and -1, which marks a missing one, None. Floats of 16 and 32 bits become the one
    whose text is shortest; images of a streamed Hub data set are fetched. ValueError for the number of no class.
    """
    if value is None:
        return None
    if hasattr(feature, "int2str"):  # a ClassLabel
        return feature.int2str(value) if value != -1 else None
    if str(kind) in SHORT_FLOATS:
        return float(str(kind.to_pandas_dtype()(value)))  # numpy writes the shortest
    if str(kind) == "extension<arrow.json>":
        return parse_json(value)
    if type(feature).__name__ == "Image" and value["bytes"] is None and HUB_FILE.match(value["path"] or ""):
        import fsspec  # of `datasets`

        with fsspec.open(value["path"], "rb") as file:
            return {"bytes": file.read()}
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, dict):
        features = feature if isinstance(feature, dict) else {}
        return {field.name: plain_value(value[field.name], field.type, features.get(field.name)) for field in kind}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [plain_value(item, kind.value_type, inner) for item in value]
    return value


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The object of keys and values; ValueError for two values of one key, of which json would take the last."""
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise ValueError(f"an object has several values of {key!r}")
        record[key] = value
    return record


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError for an object with two values of one key."""
    return json.loads(text, object_pairs_hook=unique)


def has_names(feature: Any) -> bool:
    """True of a ClassLabel of `datasets`, and of lists of one."""
    return hasattr(getattr(feature, "feature", feature), "int2str")


def is_empty(value: Any) -> bool:
    """True for no value: None, NaN, NaT, pandas.NA, an empty text or list."""
    if value is None or (isinstance(value, (str, bytes, list, tuple, dict)) and not value):
        return True
    return type(value).__name__ == "NAType" or bool(value != value)


def clean_text(value: Any, strip: bool = True) -> str:
    """Text with \\n as its only line end and, with strip, without the white space around it; "" for a missing value."""
    if is_empty(value) or value in (float("inf"), -float("inf")):
        return ""
    to_text = next((function for kind, function in TEXTS.items() if isinstance(value, kind)), None)
    if to_text is None or isinstance(value, bool):
        raise ExampleError(f"has {str(value)[:40]!a}, of type {type(value).__name__}, which must be text")
    text = to_text(value).replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON and the names of files can hold it
        raise ExampleError(f"has half of a character, {text[error.start]!a}, in a text; write it again") from None
    return text.strip() if strip else text


def _duration(value: datetime.timedelta) -> str:
    if getattr(value, "nanoseconds", 0):
        return str(value)  # of pandas, which alone knows them
    return str(datetime.timedelta(value.days, value.seconds, value.microseconds))


def _content(path: Path) -> str:
    try:
        return files.read_text(path)
    except FileError as error:
        raise ExampleError(f"has no text: {error}; write it, or remove the image") from None


TEXTS: dict[type, Callable[[Any], str]] = {
    str: str,
    int: str,
    float: repr,
    decimal.Decimal: "{:f}".format,  # not 1E+3
    datetime.datetime: lambda value: value.isoformat(" "),
    datetime.date: str,
    datetime.time: str,
    datetime.timedelta: _duration,
    uuid.UUID: str,
    Path: _content,
}
