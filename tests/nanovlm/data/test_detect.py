"""The data at a path are opened, or the message says what is missing."""

from pathlib import Path

import pytest

from nanovlm import EMBEDDED
from nanovlm.data import open_source
from nanovlm.errors import DataError
from nanovlm.synthetic.recipe import scene_source
from support.data import OPTIONS, check_refused, png, read_all, write
from support.logs import log_lines

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def test_generator_is_opened_by_its_name():
    scenes = open_source("scenes", OPTIONS, {"scenes": scene_source})
    one, again, other = scenes[7], scenes[7], scenes[8]
    assert one.qa_pairs == again.qa_pairs and one.images[0].tobytes() == again.images[0].tobytes()
    assert (one.name, len(one.qa_pairs)) == ("scenes[7]", 8)
    assert one.images[0].tobytes() != other.images[0].tobytes()
    check_refused("scenes", "scenes: no such file or folder")
    Path("scenes").mkdir()
    with pytest.raises(DataError, match="no images found in scenes"):
        open_source("scenes", OPTIONS, {"scenes": scene_source})


def test_paths_without_data_are_refused_with_the_reason():
    Path("empty").mkdir()
    for path, content, *words in (
        ("a.png", png(1), "a.png has no known extension; data is images with a .txt beside each"),
        ("a.doc", b"x", "a.doc has no known extension"),
        ("two/b.json", [], "no images found"),
        ("two/a.json", [], "no images found"),
        ("what.json", [{"a": 1, "b": 2}], "no images found", "only a, b"),
        ("object.json", {"a": 1}, "dict, not a list"),
        ("broken.json", b"{", "broken.json cannot be read"),
        ("words.json", ["a"], "words.json[0] is str"),
    ):
        write(path, content)
        check_refused(path, *words)
    check_refused("empty", "no images found in empty", ".txt", "metadata.jsonl")
    check_refused("nowhere", "nowhere: no such file or folder")
    check_refused("no/where/at/all", "no such file or folder")
    check_refused("two", "holds 2 .json files", "two/a.json")
    check_refused(str(EMBEDDED), "holds a model, not data", "--model")


def test_a_folder_of_several_formats_names_what_is_not_read():
    for i in range(2):
        write(f"mine/{i}.png", png(i))
    write("mine/1.txt", "One.")
    write("mine/chat.json", [])
    write("mine/metadata.jsonl", [{"file_name": "0.png", "text": "Zero."}])
    with log_lines() as lines:
        assert len(open_source("mine", OPTIONS)) == 1
    assert lines == [
        "mine: reading the metadata tables; not read: images with a .txt beside each; chat.json. "
        "Give each kind a folder of its own"
    ]
    Path("mine/metadata.jsonl").unlink()
    write("mine/0.txt", "Zero.")
    with log_lines() as lines:
        assert len(open_source("mine", OPTIONS)) == 2
    assert lines == ["mine: reading the images with a .txt beside each; not read: chat.json. Name those to add them"]
    Path("mine/chat.json").unlink()
    with log_lines() as lines:
        open_source("mine", OPTIONS)
    assert lines == []


def test_a_csv_of_another_name_or_separator_is_read_or_named():
    write("mine/a.png", png(3))
    for mark in ";\t":
        write("mine/captions.csv", f'file_name{mark}text\na.png{mark}"A; b,\tc"\n')
        ((_, seeds, pairs, _),) = read_all("mine")
        assert seeds == [3] and [answer for _, answer in pairs] == ["A; b,\tc"]
    write("mine/a.txt", "B")
    with log_lines() as lines:
        open_source("mine", OPTIONS)
    assert lines == ["mine: reading the images with a .txt beside each; not read: captions.csv. Name those to add them"]
    write("mine/captions.csv", "file;caption\na.png;A\n")
    check_refused("mine/captions.csv", "has no column 'file_name', only caption, file")
