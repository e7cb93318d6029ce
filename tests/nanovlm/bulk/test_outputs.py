"""Output files: whatever stops a run and whoever edits a caption meanwhile, no text is lost and none is there twice."""

import json
import os
from pathlib import Path

import pytest

from nanovlm.bulk.options import OutputOptions
from nanovlm.bulk.outputs import open_output
from nanovlm.data.jsonl import read_jsonl
from support.caption_files import OUTPUTS, CaptionFiles, Killed


class Files(CaptionFiles):
    """Captions of a.png, b.png, ... and runs that write them."""

    def open(self, existing="skip"):
        return open_output(OutputOptions(self.out, existing), self.folder)

    def image(self, name):
        return str(self.folder / f"{name}.png")

    def begin(self, existing="skip", **captions):
        """A run that has written some captions and has not finished."""
        output = self.open(existing)
        for name, text in captions.items():
            output.write(self.image(name), text)
        return output

    def run(self, existing="skip", **captions):
        """A whole run; returns the names that it captioned."""
        output = self.open(existing)
        todo = [name for name in captions if not output.is_done(self.image(name))]
        for name in todo:
            output.write(self.image(name), captions[name])
        output.finish([self.image(name) for name in captions])
        return todo


@pytest.fixture(params=OUTPUTS)
def kind(request):
    return request.param


@pytest.fixture
def files(tmp_path, kind):
    return Files(tmp_path, kind)


of_sidecars = pytest.mark.parametrize("kind", ["txt"])
of_tables = pytest.mark.parametrize("kind", ["captions.jsonl"])


def test_what_an_interrupted_run_has_written_and_what_was_edited_since_is_done(files):
    files.edit(x="old")
    files.begin(a="new", b="new")
    files.edit(a="mine")
    assert files.run(a="next", b="next", c="next", x="next") == ["c"]
    assert files.texts() == {"a": "mine", "b": "new", "c": "next", "x": "old"}


@of_sidecars
def test_a_sidecar_written_during_a_run_that_skips_is_kept(files, caplog):
    output = files.open()
    assert not output.is_done(files.image("a"))
    files.edit(a="mine")
    output.write(files.image("a"), "new")
    assert files.texts() == {"a": "mine"} and "it is kept" in caplog.text


@of_sidecars
def test_an_empty_sidecar_is_no_caption(files):
    Path(files.image("a")).with_suffix(".txt").touch()
    assert files.run(a="new") == ["a"] and files.texts() == {"a": "new"}


@of_sidecars
def test_a_link_to_a_folder_names_the_same_sidecars(files):
    output, link = files.open(), files.folder / "link"
    link.symlink_to(files.folder)
    assert [output.reject_reason(name) is None for name in (files.image("a"), f"{link}/a.jpg")] == [True, False]


def rows_of(files, *rows):
    files.path.write_text("".join(json.dumps({"file_name": name, **row}) + "\n" for name, row in rows))


@of_tables
@pytest.mark.parametrize("existing", ["skip", "overwrite"])
def test_a_caption_takes_the_place_of_its_row_and_other_rows_and_columns_stay(files, existing):
    others = [("x.png", {"text": "1"}), ("x.png", {"text": "2"}), ("a.png", {"question": "?"})]
    rows_of(files, ("a.png", {"n": 1, "text": ""}), *others, ("b.png", {"n": 2}))
    assert files.run(existing, a="A", b="B") == ["a", "b"]
    expected = [("a.png", {"n": 1, "text": "A"}), *others, ("b.png", {"n": 2, "text": "B"})]
    found = [(row.pop("file_name"), row) for row in read_jsonl(files.path)]
    assert sorted(found, key=str) == sorted(expected, key=str) and found[1:3] == others[:2]


@of_tables
@pytest.mark.parametrize("existing", ["skip", "overwrite"])
def test_a_table_edited_during_the_run_keeps_the_edits(files, existing):
    rows_of(files, ("a.png", {"text": "" if existing == "skip" else "old"}), ("x.png", {"text": "other"}))
    output = files.begin(existing, a="new", b="new")
    table = files.path.read_text()
    for old, new in (('"a.png", "text": ""', '"a.png", "text": "mine"'), ("other", "edited")):
        table = table.replace(old, new)
    files.path.write_text(table + '{"file_name": "c.png", "text": "added"}\n')
    output.finish([])
    a = "mine" if existing == "skip" else "new"
    assert files.texts() == {"a": a, "b": "new", "c": "added", "x": "edited"}


@of_tables
@pytest.mark.parametrize("existing", ["skip", "overwrite"])
@pytest.mark.parametrize("after", [False, True])
def test_a_run_killed_while_it_finishes_a_table_loses_nothing(files, existing, after, monkeypatch):
    rows_of(files, ("a.png", {"text": "" if existing == "skip" else "old"}), ("x.png", {"text": "x"}))

    def dies(*args, replace=os.replace):
        if after:
            replace(*args)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", dies)
        files.run(existing, a="new", b="new")
    texts = {(row["file_name"], row["text"]) for row in read_jsonl(files.path)}
    assert texts >= {("a.png", "new"), ("b.png", "new"), ("x.png", "x")}
    files.run(existing, a="again", b="again")
    again = "new" if existing == "skip" else "again"
    assert files.texts() == {"a": again, "b": again, "x": "x"}


@of_sidecars
def test_a_caption_that_could_not_be_written_is_tried_again(files, monkeypatch):
    output = files.begin(a="new")

    def denied(*args):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", denied)
        with pytest.raises(PermissionError):
            output.write(files.image("b"), "new")
    assert files.run(a="new", b="new") == ["b"]
    assert files.texts() == {"a": "new", "b": "new"}


@of_tables
def test_an_unfinished_last_line_is_removed_and_shown(files, caplog):
    """Wherever a killed process left it, within a character, too; a line that lacks its end alone is whole."""
    first, last = (json.dumps({"file_name": f"{name}.png", "text": "é"}, ensure_ascii=False).encode() for name in "ab")
    for length in range(1, len(last) + 1):
        files.path.write_bytes(first + b"\n" + last[:length])
        is_whole = length == len(last)
        assert files.run(a="new", b="new") == ["b"] * (not is_whole)
        assert files.texts() == {"a": "é", "b": "é" if is_whole else "new"}
    assert 'removed its unfinished last line: {"file_name": "b.png", "te\n' in caplog.text


def test_files_follow_the_umask(files):
    before = os.umask(0o027)
    try:
        files.run(a="new")
    finally:
        os.umask(before)
    (written,) = (path for path in files.folder.iterdir() if path.is_file())
    assert written.stat().st_mode & 0o777 == 0o640
