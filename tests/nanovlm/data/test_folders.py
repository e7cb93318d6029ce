"""Folders of images with captions beside them or in a metadata table."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanovlm import PROMPT
from nanovlm.data import ReadOptions
from support.data import OPTIONS, check_refused, png, read_all, write

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def test_folder_of_images_with_captions_beside_them():
    for name, seed in (("b.png", 1), ("cats/a.PNG", 2), ("cats/deep er/ü.v2.png", 3), (".trash/x.png", 4)):
        write(f"mine/{name}", png(seed))
        write(Path("mine", name).with_suffix(".txt"), f"\ufeff Number {seed}.\r\n")
    write("mine/notes.txt", "not about an image")
    assert read_all("mine") == [
        ("mine/b.png", [1], [("What?", "Number 1.")], False),
        ("mine/cats/a.PNG", [2], [("What?", "Number 2.")], False),
        ("mine/cats/deep er/ü.v2.png", [3], [("What?", "Number 3.")], False),
    ]
    assert read_all("mine", ReadOptions())[0][2] == [(PROMPT, "Number 1.")]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_to_folders_are_followed_and_no_folder_is_read_twice():
    for name in ("mine/b/1", "far/2", "far/deep/3"):
        write(f"{name}.png", png(1))
        write(f"{name}.txt", "one")
    for link, target in (("mine/a", "b"), ("mine/b/up", ".."), ("mine/c", "../far"), ("far/deep/loop", "..")):
        Path(link).symlink_to(target, target_is_directory=True)
    assert [name for name, *_ in read_all("mine")] == ["mine/b/1.png", "mine/c/2.png", "mine/c/deep/3.png"]


def test_images_in_a_model_folder_are_left_out():
    """train.py --data . --out out leaves a report.png there."""
    for name in ("a", "photos/b", "out/report"):
        write(f"mine/{name}.png", png(1))
    for name in ("a", "photos/b"):
        write(f"mine/{name}.txt", "one")
    check_refused("mine", "captions missing: 1 of 3", "out/report.png")
    write("mine/out/model.safetensors", "")
    assert [name for name, *_ in read_all("mine")] == ["mine/a.png", "mine/photos/b.png"]


def test_missing_captions_are_counted_and_named():
    for i in range(6):
        write(f"mine/{i}.png", png(i))
    check_refused("mine", "captions missing: 6 of 6 images in mine", ": 0.png, 1.png, 2.png ...", "write them")
    write("mine/3.txt", "three")
    check_refused("mine", "5 of 6", ": 0.png, 1.png, 2.png ...", "--on-error skip")
    assert read_all("mine", replace(OPTIONS, on_error="skip")) == [("mine/3.png", [3], [("What?", "three")], False)]


ROWS = [{"file_name": "a.png", "text": " one\n", "n": 1}, {"file_name": "in/b.png", "text": "two", "n": 2}]
CSV = 'file_name,text,n\na.png," one\n",1\nin/b.png,two,2\n'


@pytest.mark.parametrize("kind", ["jsonl", "csv", pytest.param("parquet", marks=pytest.mark.full)])
def test_imagefolder_of_each_table_format(kind):
    write("mine/a.png", png(1))
    write("mine/in/b.png", png(2))
    if kind == "parquet":
        pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), "mine/metadata.parquet")
    else:
        write(f"mine/metadata.{kind}", CSV if kind == "csv" else ROWS)
    expected = [("mine/a.png", [1], [("What?", "one")], False), ("mine/in/b.png", [2], [("What?", "two")], False)]
    assert read_all("mine") == read_all(f"mine/metadata.{kind}") == expected
    assert read_all("mine", replace(OPTIONS, text_column="n", prompt_column="text"))[1][2] == [("two", "2")]
    for flag in ("text_column", "prompt_column"):
        options = replace(OPTIONS, **{flag: "color"})
        check_refused("mine", "no column 'color'", "only file_name, n, text", options=options)


def test_imagefolder_in_subfolders_with_questions_and_several_answers():
    for part, seed in (("wild", 1), ("tame", 2)):
        write(f"mine/{part}/a.png", png(seed))
        row = {"file_name": "a.png", "question": f"Who is {seed}?", "answer": [f"{seed}", "nobody"]}
        write(f"mine/{part}/metadata.jsonl", [row])
    assert read_all("mine") == [
        ("mine/tame/a.png", [2], [("Who is 2?", "2"), ("Who is 2?", "nobody")], False),
        ("mine/wild/a.png", [1], [("Who is 1?", "1"), ("Who is 1?", "nobody")], False),
    ]


def test_of_a_copied_data_set_the_training_split_is_read(caplog):
    for part, seed in (("train", 1), ("test", 2)):
        write(f"mine/{part}/a.png", png(seed))
        write(f"mine/{part}/metadata.jsonl", [{"file_name": "a.png", "text": part}])
    assert [name for name, *_ in read_all("mine")] == ["mine/train/a.png"]
    assert "reading the training split; not read: test/metadata.jsonl. Name those" in caplog.text


def test_incomplete_or_broken_tables_are_refused():
    write("cut/metadata.csv", b"file_name,text\na.png,a square, on a table\n")
    check_refused("cut", "row 1, has more cells than columns; put quotes around a text that holds ','")
    write("wide/metadata.csv", "file_name,text\na.png,é\n".encode("utf-16"))
    check_refused("wide", "wide/metadata.csv cannot be read: ", "; save it as UTF-8")
    write("twice/metadata.csv", b"file_name,note,text,note\na.png,x,y,z\n")
    check_refused("twice", "twice/metadata.csv has several columns named 'note'; rename or remove all but one")
    for rows, *words in (
        ([{"image": "a.png", "text": "x"}], "no column 'file_name', only image, text"),
        ([{"file_name": "a.png", "n": "x"}], "no column text, caption", "only file_name, n", "--text-column"),
        ([], "no images found", "has no rows"),
        ([{"file_name": "a.png", "text": "x"}, {"file_name": ""}], "metadata.jsonl, row 2 has no file_name"),
        ('{"file_name": "a.png", "text": "x"}\n{oops\n', "metadata.jsonl, line 2, cannot be read"),
    ):
        write("mine/metadata.jsonl", rows)
        check_refused("mine", *words)


@pytest.mark.full
def test_a_broken_parquet_table_is_refused():
    write("mine/metadata.parquet", "PAR1")
    check_refused("mine", "metadata.parquet cannot be read")
