"""Output files and their resume log: whatever stops a run and whoever edits a caption meanwhile, no text is lost."""

import json
import os
from contextlib import contextmanager

import pytest

from nanovlm.bulk.options import OutputOptions
from nanovlm.bulk.outputs import open_output
from support.caption_files import MODES, OUTPUTS, CaptionFiles, Killed


class Files(CaptionFiles):
    """Captions of a.png, b.png, ... and runs that write them."""

    def open(self, existing, settings="of a run"):
        return open_output(OutputOptions(self.out, existing), self.folder, {"existing": existing, "settings": settings})

    def image(self, name):
        return str(self.folder / f"{name}.png")

    def begin(self, existing, **captions):
        """A run that has written some captions and has not finished."""
        output = self.open(existing)
        for name, text in captions.items():
            output.write(self.image(name), text)
        return output

    def run(self, existing, captions, settings="of a run"):
        """A whole run; returns the names that it captioned."""
        output = self.open(existing, settings)
        todo = [name for name in captions if not output.is_done(self.image(name))]
        for name in todo:
            output.write(self.image(name), captions[name])
        output.finish()
        return todo


@pytest.fixture(params=OUTPUTS)
def kind(request):
    return request.param


@pytest.fixture
def files(tmp_path, kind):
    return Files(tmp_path, kind)


of_sidecars = pytest.mark.parametrize("kind", ["txt"])


@pytest.mark.parametrize("existing", MODES)
@pytest.mark.parametrize("then", MODES)
def test_an_edit_after_an_interrupted_run_survives_the_next_run(files, existing, then):
    """The next run is the same command, or one with another --existing; only overwriting anew may replace the edit."""
    if existing != "skip":
        files.edit(a="old", b="old")
    files.begin(existing, a="new")  # interrupted after one image
    files.edit(a="mine")
    files.run(then, {"a": "next", "b": "next"})
    if then == existing or then == "skip":
        assert files.texts()["a"] == "mine"
    else:
        assert files.texts()["a"] == "next"
    assert files.texts()["b"] == ("old" if existing == "overwrite" and then == "skip" else "next")


@pytest.mark.parametrize("existing", MODES)
@pytest.mark.parametrize("kind", OUTPUTS[1:])
def test_a_table_edited_during_the_run_keeps_the_edits(files, existing, caplog):
    files.edit(a="" if existing == "skip" else "old", x="other")
    output = files.begin(existing, a="new", b="new")
    files.edit(a="mine", x="edited", c="added")
    output.finish()
    assert files.texts() == {"a": "mine", "b": "new", "c": "added", "x": "edited"}
    assert "kept 1 texts that changed" in caplog.text and "a.png" in caplog.text


@of_sidecars
def test_a_sidecar_written_during_a_run_that_skips_is_kept(files, caplog):
    output = files.open("skip")
    assert not output.is_done(files.image("a"))
    files.edit(a="mine")
    output.write(files.image("a"), "new")
    assert files.texts() == {"a": "mine"} and "it is kept" in caplog.text


@of_sidecars
def test_a_link_to_a_folder_names_the_same_sidecars(files):
    output, link = files.open("overwrite"), files.folder / "link"
    link.symlink_to(files.folder)
    assert [output.reject_reason(name) is None for name in (files.image("a"), f"{link}/a.jpg")] == [True, False]


@of_sidecars
def test_a_resume_log_of_sidecars_holds_no_text(files):
    files.edit(a="secret")
    files.begin("overwrite", a="caption")
    log = files.log.read_text()
    assert "a.png" in log and "secret" not in log and "caption" not in log.replace("captions", "")


@contextmanager
def killed_at_replacement(n=1, after=False):
    """The process is killed at its nth os.replace, before or after it."""
    replace, calls = os.replace, []

    def dies(*args):
        calls.append(args)
        if len(calls) == n and not after:
            raise Killed
        replace(*args)
        if len(calls) == n:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", dies)
        yield


@of_sidecars
@pytest.mark.parametrize("after", [False, True])
def test_a_run_killed_while_it_writes_a_sidecar_adds_its_caption_once(files, after):
    files.edit(a="old", b="old", c="old")
    output = files.begin("overwrite", a="new")
    with killed_at_replacement(1, after):
        output.write(files.image("b"), "new")
    files.begin("overwrite", c="new")  # killed again, after another image
    assert files.run("overwrite", dict.fromkeys("abc", "new")) == ([] if after else ["b"])
    assert set(files.texts().values()) == {"new"}


@of_sidecars
def test_a_sidecar_edited_after_a_kill_while_it_was_written_is_kept(files):
    files.edit(a="old")
    output = files.open("overwrite")
    with killed_at_replacement(2):  # the first is that of the log itself
        output.write(files.image("a"), "new")
    files.edit(a="mine")
    assert files.run("overwrite", {"a": "new"}) == [] and files.texts() == {"a": "mine"}


@pytest.mark.parametrize("existing", MODES)
@pytest.mark.parametrize("kind", OUTPUTS[1:])
@pytest.mark.parametrize("after", [False, True])
def test_a_run_killed_while_it_finishes_a_table_adds_its_captions_once(files, existing, after):
    files.edit(a="" if existing == "skip" else "old")
    output = files.begin(existing, a="new", b="new")
    with killed_at_replacement(1, after):
        output.finish()
    assert files.run(existing, {"a": "again", "b": "again"}) == []
    assert files.texts() == {"a": "new", "b": "new"}


@of_sidecars
def test_a_caption_that_could_not_be_written_is_tried_again(files, monkeypatch):
    files.edit(a="old", b="old")
    output = files.begin("overwrite", a="new")

    def denied(*args):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", denied)
        with pytest.raises(PermissionError):
            output.write(files.image("b"), "new")
    assert files.run("overwrite", {"a": "new", "b": "new"}) == ["b"]
    assert files.texts() == {"a": "new", "b": "new"}


@pytest.mark.parametrize("kind", ["captions.jsonl"])
def test_an_unfinished_last_line_is_removed_and_shown(files, caplog):
    """Wherever a killed process left it, within a character, too; a line that lacks its end alone is whole."""
    first, last = (json.dumps({"file_name": f"{name}.png", "text": "é"}, ensure_ascii=False).encode() for name in "ab")
    for length in range(1, len(last) + 1):
        files.path.write_bytes(first + b"\n" + last[:length])
        is_whole = length == len(last)
        assert files.run("skip", {"a": "new", "b": "new"}) == ["b"] * (not is_whole)
        assert files.texts() == {"a": "é", "b": "é" if is_whole else "new"}
    assert 'removed its unfinished last line: {"file_name": "b.png", "te\n' in caplog.text


def test_files_follow_the_umask(files):
    before = os.umask(0o027)
    try:
        files.run("overwrite", {"a": "new"})
    finally:
        os.umask(before)
    written = [path for path in files.folder.iterdir() if path.is_file()]
    assert len(written) == 1 and {path.stat().st_mode & 0o777 for path in written} == {0o640}
