"""Output files and their resume log: whatever stops a run and whoever edits a caption meanwhile, no text is lost."""

import os
from pathlib import Path

import pytest

from nanovlm.bulk.options import OutputOptions
from nanovlm.bulk.outputs import open_output, write_table
from nanovlm.bulk.resume_log import ResumeLog
from nanovlm.data.folders import read_table
from nanovlm.errors import UsageError

PARQUET = pytest.param("captions.parquet", marks=pytest.mark.full)
OUTPUTS = ["txt", "captions.jsonl", "captions.csv", PARQUET]
MODES = ["skip", "overwrite", "append", "prepend"]
CHANGING = ["overwrite", "append", "prepend"]
EXPECTED = {"skip": "{old}", "overwrite": "{new}", "append": "{old} {new}", "prepend": "{new} {old}"}


class Killed(BaseException):
    """What `kill -9` does to a process, as far as its files can tell."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path


class Files:
    """Captions of a.png, b.png, ... in one kind of output, read and edited as a person does."""

    def __init__(self, folder, kind):
        self.folder, self.kind, self.path = folder, kind, folder / kind

    def open(self, existing, settings="of a run"):
        out = "txt" if self.kind == "txt" else self.path
        return open_output(OutputOptions(out, existing), self.folder, {"existing": existing, "settings": settings})

    def image(self, name):
        return str(self.folder / f"{name}.png")

    def texts(self):
        if self.kind == "txt":
            return {path.stem: path.read_text().strip() for path in self.folder.glob("*.txt")}
        if not self.path.exists():
            return {}
        return {row["file_name"].removesuffix(".png"): row["text"] for row in read_table(self.path)}

    def edit(self, **texts):
        if self.kind == "txt":
            for name, text in texts.items():
                (self.folder / f"{name}.txt").write_text(f"{text}\n")
        else:
            rows = {name: {"file_name": f"{name}.png", "text": text} for name, text in (self.texts() | texts).items()}
            write_table(self.path, list(rows.values()))

    def run(self, existing, captions, settings="of a run"):
        """A whole run; returns the names that it captioned."""
        output = self.open(existing, settings)
        todo = [name for name in captions if not output.is_done(self.image(name))]
        for name in todo:
            output.write(self.image(name), captions[name])
        output.finish()
        return todo


@pytest.fixture(params=["txt", pytest.param("captions.jsonl", marks=pytest.mark.full), "captions.csv", PARQUET])
def files(request, folder):
    return Files(folder, request.param)


# ------------------------------------------------------------------------------------------------------- edits by hand


@pytest.mark.parametrize("existing", MODES)
@pytest.mark.parametrize("then", MODES)
def test_an_edit_after_an_interrupted_run_survives_the_next_run(files, existing, then):
    """The next run is the same command, or one with another --existing; only overwriting anew may replace the edit."""
    if existing != "skip":
        files.edit(a="old", b="old")
    files.open(existing).write(files.image("a"), "new")  # interrupted after one image
    files.edit(a="mine")
    files.run(then, {"a": "next", "b": "next"})
    if then == existing or then == "skip":
        assert files.texts()["a"] == "mine"
    else:
        assert files.texts()["a"] == EXPECTED[then].format(old="mine", new="next")
    b = "" if existing == "skip" else "old"
    assert files.texts()["b"] == (EXPECTED[then].format(old=b, new="next").strip() if b or then != "skip" else "next")


@pytest.mark.parametrize("existing", CHANGING)
def test_an_edit_before_an_image_is_reached_is_what_its_caption_is_added_to(files, existing):
    files.edit(a="old", b="old")
    files.open(existing).write(files.image("a"), "new")
    files.edit(b="mine")
    assert files.run(existing, {"a": "again", "b": "next"}) == ["b"]
    assert files.texts() == {
        "a": EXPECTED[existing].format(old="old", new="new"),
        "b": EXPECTED[existing].format(old="mine", new="next"),
    }


@pytest.mark.parametrize("existing", MODES)
@pytest.mark.parametrize("kind", OUTPUTS[2:])
def test_a_table_edited_during_the_run_keeps_the_edits(folder, kind, existing, caplog):
    files = Files(folder, kind)
    files.edit(a="" if existing == "skip" else "old", x="other")
    output = files.open(existing)
    output.write(files.image("a"), "new")
    output.write(files.image("b"), "new")
    files.edit(a="mine", x="edited", c="added")
    output.finish()
    assert files.texts() == {"a": "mine", "b": "new", "c": "added", "x": "edited"}
    assert "kept 1 texts that changed" in caplog.text and "a.png" in caplog.text


def test_a_sidecar_written_during_a_run_that_skips_is_kept(folder, caplog):
    files = Files(folder, "txt")
    output = files.open("skip")
    assert not output.is_done(files.image("a"))
    files.edit(a="mine")
    output.write(files.image("a"), "new")
    assert files.texts() == {"a": "mine"} and "it is kept" in caplog.text


@pytest.mark.parametrize("existing", ["append", "prepend"])
def test_captions_edited_after_a_finished_run_are_not_added_to_again(files, existing):
    files.edit(a="old", b="old")
    assert files.run(existing, {"a": "new", "b": "new"}) == ["a", "b"]
    files.edit(a="mine", b="old")  # b as it was before
    assert files.run(existing, {"a": "new", "b": "new"}) == []
    assert files.texts() == {"a": "mine", "b": "old"}
    assert files.run(existing, {"a": "new"}, settings="of another") == ["a"]
    assert files.texts() == {"a": EXPECTED[existing].format(old="mine", new="new"), "b": "old"}


def test_a_resume_log_of_sidecars_holds_no_text(folder):
    files = Files(folder, "txt")
    files.edit(a="secret")
    files.open("append").write(files.image("a"), "caption")
    log = (folder / "captions.run").read_text()
    assert "a.png" in log and "secret" not in log and "caption" not in log.replace("captions", "")


# ------------------------------------------------------------------------------------------------------- interruptions


def kill_at_replacement(monkeypatch, n, after=False):
    """Kill the process at its nth os.replace from now on, before or after it."""
    replace, calls = os.replace, [0]

    def dies(*args):
        calls[0] += 1
        if calls[0] == n and not after:
            raise Killed
        replace(*args)
        if calls[0] == n:
            raise Killed

    monkeypatch.setattr(os, "replace", dies)


@pytest.mark.parametrize("existing", CHANGING)
@pytest.mark.parametrize("after", [False, True])
def test_a_run_killed_while_it_writes_a_sidecar_adds_its_caption_once(folder, monkeypatch, existing, after):
    files = Files(folder, "txt")
    files.edit(a="old", b="old", c="old")
    output = files.open(existing)
    output.write(files.image("a"), "new")
    with monkeypatch.context() as patch:
        kill_at_replacement(patch, 1, after)
        with pytest.raises(Killed):
            output.write(files.image("b"), "new")
    files.open(existing).write(files.image("c"), "new")  # killed again, after another image
    assert files.run(existing, dict.fromkeys("abc", "new")) == ([] if after else ["b"])
    assert set(files.texts().values()) == {EXPECTED[existing].format(old="old", new="new")}


@pytest.mark.parametrize("existing", CHANGING)
def test_a_sidecar_edited_after_a_kill_while_it_was_written_is_kept(folder, monkeypatch, existing):
    files = Files(folder, "txt")
    files.edit(a="old")
    output = files.open(existing)
    with monkeypatch.context() as patch:
        kill_at_replacement(patch, 2)  # the first is that of the log itself
        with pytest.raises(Killed):
            output.write(files.image("a"), "new")
    files.edit(a="mine")
    assert files.run(existing, {"a": "new"}) == [] and files.texts() == {"a": "mine"}


@pytest.mark.parametrize("existing", MODES)
@pytest.mark.parametrize("kind", OUTPUTS[1:])
@pytest.mark.parametrize("after", [False, True])
def test_a_run_killed_while_it_finishes_a_table_adds_its_captions_once(folder, monkeypatch, kind, existing, after):
    files = Files(folder, kind)
    files.edit(a="" if existing == "skip" else "old")
    output = files.open(existing)
    output.write(files.image("a"), "new")
    output.write(files.image("b"), "new")
    with monkeypatch.context() as patch:
        kill_at_replacement(patch, 1, after)
        with pytest.raises(Killed):
            output.finish()
    assert files.run(existing, {"a": "again", "b": "again"}) == []
    expected = "new" if existing == "skip" else EXPECTED[existing].format(old="old", new="new")
    assert files.texts() == {"a": expected, "b": "new"}


def test_a_caption_that_could_not_be_written_is_tried_again(folder, monkeypatch):
    files = Files(folder, "txt")
    files.edit(a="old", b="old")
    output = files.open("append")
    output.write(files.image("a"), "new")

    def denied(*args):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", denied)
        with pytest.raises(PermissionError):
            output.write(files.image("b"), "new")
    output.finish()
    assert files.run("append", {"a": "new", "b": "new"}) == ["b"]
    assert files.texts() == {"a": "old new", "b": "old new"}


@pytest.mark.parametrize("existing", CHANGING)
def test_other_settings_begin_anew_but_keep_what_was_written(files, existing):
    files.edit(a="old", b="old")
    files.open(existing).write(files.image("a"), "new")
    first = EXPECTED[existing].format(old="old", new="new")
    assert files.run(existing, {"a": "2", "b": "2"}, settings="of another") == ["a", "b"]
    assert files.texts()["a"] == EXPECTED[existing].format(old=first, new="2")


def test_the_log_of_another_run_stays_until_the_first_caption(folder):
    files = Files(folder, "txt")
    files.edit(a="old")
    files.run("append", {"a": "new"})
    files.open("append", settings="of another")
    assert files.run("append", {"a": "new"}) == [], "a run that wrote nothing has forgotten nothing"


def test_an_unfinished_last_line_is_removed_and_shown(folder, caplog):
    (folder / "captions.jsonl").write_text('{"file_name": "a.png", "text": "whole"}\n{"file_name": "b.png", "te')
    files = Files(folder, "captions.jsonl")
    assert files.run("skip", {"a": "new", "b": "new"}) == ["b"] and files.texts() == {"a": "whole", "b": "new"}
    assert 'removed its unfinished last line: {"file_name": "b.png", "te' in caplog.text


def test_files_follow_the_umask(files):
    before = os.umask(0o027)
    try:
        files.run("append", {"a": "new"})
    finally:
        os.umask(before)
    written = [path for path in files.folder.iterdir() if path.is_file()]
    assert len(written) == 2 and {path.stat().st_mode & 0o777 for path in written} == {0o640}


# -------------------------------------------------------------------------------------------------------------- log


@pytest.mark.parametrize("content", ['{"a": 1}\n', '{"settings": {}}\n{"b": 2}\n'])
def test_a_file_that_is_no_resume_log_is_refused_and_kept(folder, content):
    (path := folder / "captions.run").write_text(content)
    with pytest.raises(UsageError, match="captions.run is not the resume log"):
        ResumeLog(path, {})
    assert path.read_text() == content


@pytest.mark.parametrize("options", [{"existing": "burn"}, {"prefix": "\udcff"}, {"out": "all.xml"}, {"out": ""}])
def test_output_options_are_checked(options):
    with pytest.raises(UsageError):
        OutputOptions(**options)
    assert OutputOptions(out="x.csv").table == Path("x.csv") and OutputOptions().table is None
