"""Streams read rows as their file is read, show each once an epoch, hold images out, and go on behind a state."""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest

from nanovlm.data import ExampleError, ReadOptions, StreamedSource, open_data, open_source
from nanovlm.data.mixture import source_lines, split
from nanovlm.data.rows import example_of_table
from nanovlm.errors import DataError, TrainingError
from support.data import OPTIONS, pairs_of, png, write, write_tar

pytestmark = pytest.mark.full


def stream(n=600, n_shards=1):
    import datasets

    images = [png(i % 20) for i in range(n)]  # thirty copies of each
    rows = [{"image": {"bytes": images[i], "path": None}, "text": f"{i}"} for i in range(n)]
    data = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=n_shards).with_format("arrow")
    return StreamedSource("a", data, partial(example_of_table, folder="", features=data.features, options=OPTIONS))


def answers(reader, n):
    return [pairs_of(example)[0][1] for example, _ in islice(reader, n)]


@pytest.mark.parametrize(("n_shards", "n_parts"), [(1, 1), (3, 1), (4, 2), (3, 2), (1, 3)])
def test_the_parts_of_a_stream_show_every_row_once_an_epoch(n_shards, n_parts):
    one, shown = stream(60, n_shards), []
    for part in range(n_parts):
        order = answers(one.read("0", part, n_parts), 120 // n_parts)
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        assert first != second, "in an order of its own"
        assert n_shards % n_parts or sorted(first) == sorted(second), "of the same shards"
        shown += first
    assert sorted(shown) == sorted(map(str, range(60)))


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize("taken", [1, 255, 256, 599, 650])
def test_a_reader_goes_on_behind_a_state_that_went_through_json(taken, n_parts):
    one = stream(600, 2)
    read = list(islice(one.read("0", 0, n_parts), taken + 40))
    state = json.loads(json.dumps(read[taken - 1][1]))
    assert answers(one.read("0", 0, n_parts, state), 40) == answers(read[taken:], 40)


def test_a_stream_that_breaks_off_or_is_empty_is_one_line():
    one = stream(9)
    one.limit = "g"  # above all ranks
    with pytest.raises(DataError, match="no example to learn from in part 1 of 1"):
        next(one.read("0"))
    one.rows = one.rows.map(lambda row: 1 / 0)
    with pytest.raises(TrainingError, match="broke off .division by zero.; rerun the same command to resume"):
        next(one.read("0"))


@pytest.fixture
def library(monkeypatch):
    """`datasets`, with the name lab/KIND for its loader KIND of the folder `files`."""
    import datasets

    load = datasets.load_dataset

    def load_dataset(name, subset=None, **options):
        local = {"data_dir": "files"} if name.startswith("lab/") else {}
        return load(name.removeprefix("lab/"), **options | local)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return datasets


def write_table(datasets, path, rows=6, **columns):
    """A parquet file with images of its own, or by name, and float32, class and struct columns."""
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["red", "blue"]), n=datasets.Value("float32"),
        messages=datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
    )  # fmt: skip
    numbers = range(rows)
    chats = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}] for i in numbers]
    content = {"image": [{"bytes": png(i), "path": None} for i in numbers], "messages": chats}
    content |= {"label": [i % 3 - 1 for i in numbers], "n": [i + 0.1 for i in numbers]} | columns
    datasets.Dataset.from_dict({name: content[name] for name in features}, features).to_parquet(path)


def write_kind(kind, datasets):
    """Write data of a kind; returns their path, and options to read them with."""
    names = [{"bytes": None, "path": f"{i}.png"} for i in range(6)]
    for i in range(6) if kind in ("names below", "metadata", "imagefolder") else ():
        write(f"files/{'red' if i % 2 else 'blue'}/{i}.png" if kind == "imagefolder" else f"files/{i}.png", png(i))
        write(f"{i}.png", png(19))  # another one where the command runs
    if kind == "tar":
        parts = {"png": png, "txt": lambda i: f"{i}\n".encode(), "json": lambda i: json.dumps({"n": i}).encode()}
        write_tar("files.tar", {f"{i}.{part}": make(i) for i in range(6) for part, make in parts.items()})
        return "files.tar", {}
    if kind == "names below":
        write_table(datasets, "a.parquet", image=names)
        return "a.parquet", {"text_column": "n"}
    if kind == "metadata":
        write_table(datasets, "files/metadata.parquet", image=names)
        return "files", {"text_column": "n"}
    if kind in ("json", "csv"):
        rows = [{"image": f"{i}.png", "question": f"{i}?", "answer": 0.1 * i} for i in range(6)]
        for row in rows:
            write(row["image"], png(int(row["image"][0])))
        table = "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)])
        write("files/d.csv", table) if kind == "csv" else write("files/d.jsonl", rows)
        return f"lab/{kind}", {}
    if kind == "imagefolder":
        return "lab/imagefolder", {"text_column": "label"}
    write_table(datasets, "files/train-0.parquet")
    write_table(datasets, "files/train-1.parquet", image=[{"bytes": png(i + 6), "path": None} for i in range(6)])
    write_table(datasets, "files/test-0.parquet")
    return "files", {"text_column": {"classes": "label", "numbers": "n"}.get(kind)}


def found(path, options):
    """All examples and errors of a source, without the numbers of rows, which differ by shard."""
    source = open_source(path, options)
    if not options.stream:
        examples = [source.make_example(source.rows[i]) for i in range(len(source))]
        return sorted(repr(replace(example, name="")) for example in examples), source
    return sorted(repr(replace(example, name="")) for example in source.usable([])), source


KINDS = ["tar", "chats", "classes", "numbers", "names below", "metadata", "json", "csv", "imagefolder"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_has_the_examples_of_the_file(library, kind):
    path, columns = write_kind(kind, library)
    options = replace(OPTIONS, on_error="skip", **columns)
    (read, source), (streamed, stream) = (found(path, replace(options, stream=is_on)) for is_on in (False, True))
    assert read == streamed and len(read) in (6, 12, 8)
    assert isinstance(stream, StreamedSource) and len(source.errors) == len(stream.errors)
    lines = [[re.sub(r"\[[\d:]+\]", "[]", line) for line in one.lines[1:]] for one in (source, stream)]
    assert lines[0] == lines[1] and "are not known" in stream.lines[0]


def test_images_of_a_streamed_folder_of_the_hub_are_fetched(monkeypatch):
    import datasets
    import fsspec
    import pyarrow as pa

    monkeypatch.setattr("nanovlm.data.values.HUB_FILE", re.compile("memory://"))
    fsspec.filesystem("memory").pipe("/lab/1.png", png(1))

    def make(path):
        image = pa.array([{"bytes": None, "path": path}], datasets.Image().pa_type)
        table = pa.table({"image": image, "text": ["x"]})
        return example_of_table((table, "a[0]"), "", datasets.Features(image=datasets.Image()), OPTIONS)

    assert make("memory://lab/1.png").images == [png(1)]
    assert make("https:/lab/1.png").images == ["https:/lab/1.png"], "of other names, only files"
    with pytest.raises(ExampleError, match=r"a\[0\] cannot be read: .*2.png"):
        make("memory://lab/2.png")


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_stream_and_its_file_have_the_same_sides(library, share):
    features = library.Features(images=library.List(library.Image()), text=library.Value("string"))
    images = [[f"{i}.{k}".encode() for k in range(2)] for i in range(200)]  # which nothing decodes here
    rows = {"images": images, "text": [f"{i}" for i in range(200)]}
    library.Dataset.from_dict(rows, features).to_parquet("a.parquet")
    opened = [open_data(["a.parquet"], ReadOptions(stream=is_on), share) for is_on in (False, True)]
    read, streamed = (
        [{pairs_of(example)[0][1] for subset in side for example in subset.usable()} for side in sides]
        for sides in opened
    )
    assert read == streamed and not set.intersection(*streamed)
    assert len(set.union(*streamed)) == 200 and abs(len(streamed[1]) - 200 * share) < 15
    ((stream,), _) = opened[1]
    assert {*answers(stream.read("0"), 2 * len(streamed[0]))} == streamed[0]
    with pytest.raises(DataError, match="name a fraction"):
        split([stream], 5)
    assert split([stream], None)[1] == []


def test_a_validation_set_of_ones_own_is_compared_with_the_first_rows_of_a_stream(library):
    write_table(library, "a.parquet", rows=12)
    write("own/metadata.csv", "file_name,text\na.png,a\nb.png,b\n")
    write("own/a.png", png(11))
    write("own/b.png", png(15))
    lines = source_lines(*open_data(["a.parquet"], ReadOptions(stream=True), "own"))
    assert "own: 1 of its images are also trained on" in lines
    assert "own: compared with the first 100 rows of a.parquet, not with later ones" in lines


def test_rows_that_cannot_be_used_or_are_of_another_split_are_told(library):
    write_table(library, "a.parquet", rows=300, label=[0] * 200 + [-1] * 100)
    options = ReadOptions(stream=True, on_error="stop", text_column="label")
    with pytest.raises(ExampleError, match=r"a.parquet\[200\] has an empty answer"):
        open_data(["a.parquet"], options, 0.99)
    train, (held_out,) = open_data(["a.parquet"], replace(options, on_error="skip"), 0.99)
    list(train[0].usable(errors := []))
    assert len(held_out.errors) == len(errors) == 100
    rows = [{"image": {"bytes": png(i % 20), "path": None}, "text": "x", "split": "train"} for i in range(150)]
    rows[120]["split"] = "test"
    library.Dataset.from_list(rows).to_parquet("a.parquet")
    stream = open_source("a.parquet", ReadOptions(stream=True))
    assert len(list(stream.usable(errors := []))) == 149
    assert errors == ["a.parquet[120] is of the split 'test' among others; write each split to a file of its own"]
