"""Datasets of the datasets library: on disk, from the Hub, and as a stream."""

import json
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nanovlm.data import Mixture, ReadOptions, Subset, open_source
from nanovlm.data.source import Part
from nanovlm.errors import TrainingError
from nanovlm.training.loader import load_batches
from support import Package
from support.data import OPTIONS, check_refused, image, llava, message, png, read_all, text, write, write_tar

datasets = Package("datasets")
pytestmark = [pytest.mark.usefixtures("in_tmp_path"), pytest.mark.full]


TURNS = [{"user": "What is this?", "assistant": "A star."}, {"user": "Red?", "assistant": "Yes. "}]


def finevision():
    """Three rows as the_cauldron and FineVision have them."""
    features = datasets.Features(
        images=datasets.List(datasets.Image()),
        texts=[{"user": datasets.Value("string"), "assistant": datasets.Value("string")}],
        source=datasets.Value("string"),
    )
    rows = {
        "images": [[image(1)], [image(2)], [image(3), image(4)]],
        "texts": [TURNS, TURNS[:1], TURNS],
        "source": ["a", "b", "c"],
    }
    return datasets.Dataset.from_dict(rows, features=features)


PAIRS = [("What is this?", "A star."), ("Red?", "Yes.")]
EXPECTED = [([1], PAIRS, True), ([2], PAIRS[:1], False), ([3, 4], PAIRS, True)]
STREAMED = replace(OPTIONS, stream=True)


@pytest.mark.parametrize("form", ["folder", "splits", "parquet", "arrow"])
def test_the_cauldron_rows_on_disk(form, datasets_cache):
    rows, path = finevision(), "rows"
    if form == "folder":
        rows.save_to_disk(path)
    elif form == "splits":
        datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(path)
    else:
        Path(path).mkdir()
        rows.to_parquet("rows/a.parquet")
        if form == "arrow":
            rows.save_to_disk("saved")
            Path("rows/a.parquet").unlink()
            next(Path("saved").glob("*.arrow")).rename("rows/a.arrow")
    assert read_all(path) == [(f"rows[{i}]", *e) for i, e in enumerate(EXPECTED)]
    if form == "parquet":
        assert [rest for _, *rest in read_all("rows/a.parquet")] == [list(e) for e in EXPECTED]


@pytest.mark.parametrize("missing", ["datasets", "pyarrow"])
def test_missing_library_is_named_with_the_extra_to_install(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    write("rows/a.parquet" if missing == "datasets" else "rows/metadata.parquet", b"PAR1")
    check_refused("rows", missing, "pip install 'nanovlm[data]'")


def test_a_column_of_classes_gives_their_names(datasets_cache):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["red", "blue"])})
    datasets.Dataset.from_dict({"image": [png(1), png(2)], "label": [1, 0]}, features).save_to_disk("rows")
    pairs = [pairs for _, _, pairs, _ in read_all("rows", replace(OPTIONS, text_column="label"))]
    assert [answer for ((_, answer),) in pairs] == ["blue", "red"]


def test_rows_of_plain_columns_and_of_chats(datasets_cache):
    chat = [message("user", text("<image>Who?")), message("assistant", text("Me."))]
    image_bytes = {"bytes": png(5), "path": None}
    datasets.Dataset.from_list([{"image": image_bytes, "caption": "Five."}]).save_to_disk("plain")
    datasets.Dataset.from_list([{"images": [image_bytes], "messages": chat}]).save_to_disk("chat")
    assert read_all("plain") == [("plain[0]", [5], [("What?", "Five.")], False)]
    assert read_all("chat") == [("chat[0]", [5], [("Who?", "Me.")], False)]
    check_refused("plain", "no column 'n', only caption, image", options=ReadOptions(text_column="n"))
    datasets.Dataset.from_list([{"caption": "Five."}]).save_to_disk("blind")
    check_refused("blind", "no images found", "only caption")


def test_hub_dataset_downloaded_and_streamed(datasets_cache, monkeypatch):
    """From a Hub that has one dataset, lab/rows with its subset small."""
    finevision().to_parquet("small.parquet")
    real = datasets.load_dataset

    def load_dataset(name, subset, streaming):
        assert (name, subset) == ("lab/rows", "small")
        return real("parquet", data_files="small.parquet", streaming=streaming)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    everything = [(f"lab/rows:small[{i}]", *e) for i, e in enumerate(EXPECTED)]
    assert read_all("lab/rows:small") == read_all("lab/rows:small", STREAMED) == everything


def test_unreachable_hub_is_one_line(monkeypatch, datasets_cache):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    check_refused("lab/nothing", "lab/nothing: the datasets library cannot read it")


def test_truncated_parquet_is_reported_once(datasets_cache):
    records, listener = [], logging.Handler()
    listener.emit = records.append
    logging.getLogger("datasets").addHandler(listener)
    write("half.parquet", b"PAR1 and no end")
    check_refused("half.parquet", "half.parquet: the datasets library cannot read it", "download it again")
    logging.getLogger("datasets").removeHandler(listener)
    assert records == []


def name_of(mixture, n_parts, i):
    """The name of the i-th example, which is of part i % n_parts."""
    turn, part = divmod(i, n_parts)
    return mixture.example(turn, part=Part(part, n_parts)).name


@pytest.mark.parametrize("n_parts", [1, 2])
def test_a_worker_process_reads_the_whole_of_a_part(n_parts, datasets_cache):
    """Each worker takes every second batch; the library would distribute the shards among the workers instead."""
    Path("rows").mkdir()
    for i in range(5):
        finevision().to_parquet(f"rows/{i}.parquet")
    stream = open_source("rows", STREAMED)
    assert len(stream.shards) == 5
    mixture = Mixture([Subset(stream, ())], 0)
    order = [name_of(mixture, n_parts, i) for i in range(14)]
    rows = {f"rows[{shard}:{row}]" for shard in range(5) for row in range(3)}
    assert len(set(order)) == 14 and rows > set(order), "all but one, before any comes again"
    if n_parts == 2:
        shards = [{name.rpartition("[")[2].partition(":")[0] for name in order[part::2]} for part in (0, 1)]
        assert shards[0] & shards[1] == {"4"}, "the shard that is left over"
    with load_batches(partial(name_of, mixture, n_parts), range(14), 2) as names:
        assert list(names) == order


def test_shards_at_an_address_are_read_or_streamed(datasets_cache):
    """file:// stands for hf://, s3:// and https://, which `datasets` opens in the same way."""
    finevision().to_parquet("a.parquet")
    address = Path("a.parquet").resolve().as_uri()
    for options in (OPTIONS, STREAMED):
        assert [rest for _, *rest in read_all(address, options)] == [list(e) for e in EXPECTED]


def test_a_broken_image_stays_bytes_until_its_example_is_encoded(datasets_cache):
    rows = {"image": [{"bytes": b"no image", "path": None}], "caption": ["x"]}
    datasets.Dataset.from_dict(
        rows, datasets.Features(image=datasets.Image(), caption=datasets.Value("string"))
    ).to_parquet("a.parquet")
    assert open_source("a.parquet", OPTIONS)[0].images == [b"no image"]
    stream = open_source("a.parquet", STREAMED)
    assert stream.example_at(0, "").images == [b"no image"]


CHAT = json.dumps(llava("<image><image>Same?", "No.")).encode()
FIVE = {f"{i}.{kind}": png(i) if kind == "png" else b"x" for i in range(5) for kind in ("png", "txt")}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"0.png": png(1), "0.txt": b" one \n", "x/1.png": png(2), "x/1.txt": b"\xef\xbb\xbftwo"},
            [("0", [1], "What?", "one"), ("x/1", [2], "What?", "two")],
        ),
        ({"0.PNG": png(1), "0.json": b'{"caption": "one", "n": 1}', "0.cls": b"9"}, [("0", [1], "What?", "one")]),
        ({"0.0.png": png(1), "0.1.png": png(2), "0.json": CHAT}, [("0", [1, 2], "Same?", "No.")]),
    ],
    ids=["texts", "records", "chats"],
)
@pytest.mark.parametrize("options", [OPTIONS, STREAMED], ids=["whole", "streamed"])
def test_samples_of_a_tar(files, expected, options, datasets_cache):
    write_tar("a.tar", files)
    found = [(f"a.tar[{i}] {key}", seeds, [(q, a)], False) for i, (key, seeds, q, a) in enumerate(expected)]
    assert read_all("a.tar", options) == found


def test_tars_of_a_folder_are_the_shards_of_a_stream(datasets_cache):
    Path("mine").mkdir()
    for name, seed in (("train-0", 1), ("train-1", 2), ("test-0", 3)):
        write_tar(f"mine/{name}.tar", {"0.png": png(seed), "0.txt": b"x"})
    for options in (OPTIONS, STREAMED):
        assert [seeds for _, seeds, *_ in read_all("mine", options)] == [[1], [2]]
    assert len(open_source("mine", STREAMED).shards) == 2


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"0.png": png(1), "1.png": png(1), "1.txt": b"one"}, ["don't share the same prefix or the same types"]),
        ({"0.png": png(1), "0.json": b"{"}, ["a.tar: the datasets library cannot read it", "double quotes"]),
        ({"0.txt": b"one"}, ["no images found: a.tar has samples of txt only"]),
        ({"0.png": png(1), "0.cls": b"1"}, ["captions missing: a.tar has samples of png, cls only"]),
        ({"0.png": png(1), "0.json": b'{"words": "x"}'}, ["a.tar has no column text, caption", "only images, words"]),
        (FIVE | {"5.jpg": png(1), "5.txt": b"x"}, ["a.tar[5] 5 has no image of the type that the first samples have"]),
    ],
)
def test_a_tar_without_images_or_texts_is_refused(files, words, datasets_cache):
    write_tar("a.tar", files)
    check_refused("a.tar", *words)


def test_a_tar_that_is_cut_is_refused_or_ends_the_stream(datasets_cache):
    more = {f"{i}.{kind}": FIVE[f"0.{kind}"] for i in (5, 6) for kind in ("png", "txt")}
    write_tar("a.tar", FIVE | more)
    content = Path("a.tar").read_bytes()
    Path("a.tar").write_bytes(content[: content.rindex(png(0)) + 9])
    check_refused("a.tar", "cannot read it: unexpected end of data", "download it again")
    with pytest.raises(TrainingError, match=r"a\.tar broke off .*; rerun the same command to resume"):
        read_all("a.tar", STREAMED)
