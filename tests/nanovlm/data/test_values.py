"""Every type that JSON, CSV, Arrow and `datasets` hold becomes text, or its record is unusable, by name."""

import datetime as dt
import decimal
import uuid
from dataclasses import replace

import pytest

from nanovlm.data import ExampleError, open_source
from nanovlm.data.values import clean_text, is_empty
from nanovlm.errors import DataError
from support.data import OPTIONS, pairs_of, png

UTC = dt.UTC
TEXTS = {
    " a\r\nb\rc ": "a\nb\nc", 7: "7", 10**20: "1" + "0" * 20, 0.1: "0.1", 3.0: "3.0", 1e-7: "1e-07",
    decimal.Decimal("1.50"): "1.50", decimal.Decimal("1E+3"): "1000",
    dt.date(2020, 1, 2): "2020-01-02", dt.time(1, 2): "01:02:00", dt.timedelta(days=1, seconds=1): "1 day, 0:00:01",
    dt.datetime(2020, 1, 2, 3): "2020-01-02 03:00:00", dt.datetime(2020, 1, 2, tzinfo=UTC): "2020-01-02 00:00:00+00:00",
    uuid.UUID(int=1): "00000000-0000-0000-0000-000000000001",
    None: "", float("nan"): "", float("inf"): "", decimal.Decimal("NaN"): "", "": "", (): "",
}  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), TEXTS.items(), ids=map(repr, TEXTS))
def test_text(value, expected):
    assert clean_text(value) == expected


@pytest.mark.parametrize("value", [True, b"x", ["x"], ("x",), {"a": 1}, {1}, 1j, object(), "\ud83d", "x\udce9"])
def test_no_text(value):
    with pytest.raises(ExampleError, match="which must be text|half of a character"):
        clean_text(value)


@pytest.mark.full
def test_what_pandas_writes_for_a_missing_value():
    import pandas

    assert all(map(is_empty, (pandas.NA, pandas.NaT))) and clean_text(pandas.NaT) == clean_text(pandas.NA) == ""
    assert clean_text(pandas.Timedelta("1 days")) == "1 day, 0:00:00"
    assert clean_text(pandas.Timestamp(1)) == "1970-01-01 00:00:00.000000001"


def arrow_columns():
    """Arrays of one value by name, and the text or the words of a refusal."""
    import numpy
    import pyarrow as pa

    tenth = pa.float32()
    moment = dt.datetime(2020, 1, 2, 3)
    number = pa.struct([("a", tenth)])
    return {
        "uint64": (pa.array([2**64 - 1], pa.uint64()), "18446744073709551615"),
        "float16": (pa.array([numpy.float16(0.1)], pa.float16()), "0.1"),
        "float32": (pa.array([0.1], tenth), "0.1"),
        "exponent": (pa.array([1e20], tenth), "1e+20"),
        "nan": (pa.array([float("nan")], tenth), "an empty answer"),
        "bool": (pa.array([True]), "of type bool"),
        "decimal": (pa.array([decimal.Decimal("1.50")]), "1.50"),
        "decimal32": (pa.array([decimal.Decimal("1.50")], pa.decimal32(5, 2)), "write that column as a text"),
        "date32": (pa.array([dt.date(2020, 1, 2)]), "2020-01-02"),
        "a late date": (pa.array([3_000_000], pa.date32()), "cannot be read: date value out of range"),
        "time": (pa.array([dt.time(1, 2, 3)], pa.time32("s")), "01:02:03"),
        "timestamp": (pa.array([moment], pa.timestamp("s")), "2020-01-02 03:00:00"),
        "nanoseconds": (pa.array([1], pa.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
        "zone": (pa.array([moment], pa.timestamp("us", "Europe/Berlin")), "2020-01-02 04:00:00+01:00"),
        "NaT": (pa.array([None], pa.timestamp("ns")), "an empty answer"),
        "duration": (pa.array([86401], pa.duration("s")), "1 day, 0:00:01"),
        "ns duration": (pa.array([86401 * 10**9], pa.duration("ns")), "1 day, 0:00:01"),
        "binary": (pa.array([b"x"]), "of type bytes"),
        "large string": (pa.array(["x"], pa.large_string()), "x"),
        "string view": (pa.array(["x"], pa.string_view()), "x"),
        "broken string": (pa.array([b"\xff"]).view(pa.string()), "cannot be read: 'utf-8' codec"),
        "dictionary": (pa.array(["x"]).dictionary_encode(), "x"),
        "float dictionary": (pa.array([0.1], tenth).dictionary_encode(), "0.1"),
        "null": (pa.nulls(1), "an empty answer"),
        "list": (pa.array([[0.1]], pa.list_(tenth)), "0.1"),
        "large list": (pa.array([[0.1]], pa.large_list(tenth)), "0.1"),
        "fixed list": (pa.array([[0.1]], pa.list_(tenth, 1)), "0.1"),
        "empty list": (pa.array([[]], pa.list_(tenth)), "an empty answer"),
        "list of null": (pa.array([[None]], pa.list_(tenth)), "an empty answer"),
        "list of lists": (pa.array([[[0.1]]], pa.list_(pa.list_(tenth))), "of type list"),
        "struct": (pa.array([{"a": 0.1}], number), "{'a': 0.1}"),
        "list of structs": (pa.array([[{"a": 0.1}]], pa.list_(number)), "{'a': 0.1}"),
        "map": (pa.array([[("a", 0.1)]], pa.map_(pa.string(), tenth)), "write that column as a text"),
        "json": (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["[0.1]"])), "0.1"),
        "json with a key twice": (
            pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1, "a": 2}'])),
            "cannot be read: an object has several",
        ),
    }


@pytest.mark.full
def test_every_type_of_arrow_in_a_file_and_its_stream():
    import pyarrow as pa
    from pyarrow.parquet import write_table

    for name, (column, expected) in arrow_columns().items():
        write_table(pa.table({"image": pa.array([png(1)]), "text": column}), f"{name}.parquet")
        for is_streamed in (False, True):
            try:
                source = open_source(f"{name}.parquet", replace(OPTIONS, stream=is_streamed))
            except DataError as error:
                assert expected in str(error) and f"{name}.parquet" in str(error), (name, error)
                continue
            example = next(source.usable())
            assert pairs_of(example) == [("What?", expected)], name


@pytest.mark.full
@pytest.mark.parametrize("is_streamed", [False, True])
def test_classes_also_in_lists_and_minus_one_is_missing(is_streamed):
    import datasets

    label = datasets.ClassLabel(names=["red", "nan"])
    rows = {"image": [png(1)] * 4, "text": [0, 1, -1, None], "labels": [[0, 1], [1], [-1], []]}
    features = datasets.Features(image=datasets.Image(), text=label, labels=datasets.List(label))
    datasets.Dataset.from_dict(rows, features).to_parquet("a.parquet")
    for column, expected in (("text", ["red", "nan"]), ("labels", ["red", "nan", "nan"])):
        source = open_source("a.parquet", replace(OPTIONS, stream=is_streamed, on_error="skip", text_column=column))
        examples = source.usable([])
        assert [answer for example in examples for _, answer in pairs_of(example)] == expected
        assert [error.partition("]")[0] for error in source.errors] == ["a.parquet[2", "a.parquet[3"]
