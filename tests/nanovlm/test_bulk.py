"""Captions of folders: files before, flags, files after, counts. A second run changes nothing."""

import json
import os
import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest

from models import files
from nanovlm import SAMPLE, Captioner
from nanovlm.bulk import Sidecars, Table, caption_files, caption_rows
from nanovlm.errors import OutputError, UsageError
from nanovlm.options import CaptionOptions
from nanovlm.outputs import is_torn_row
from support import ROOT, noise_image

pytestmark = pytest.mark.usefixtures("in_tmp_path")

TEXT = (
    "A large green ring, a large blue diamond, a large yellow heart and a large brown triangle on a glowing background."
)
PROMPT = "Describe this picture."
MADE = {"finish_reason": "stop", "model": "m", "prompt": PROMPT}
NFC, NFD = (unicodedata.normalize(form, "é.png") for form in ("NFC", "NFD"))


def row(name, text=TEXT, **columns):
    return json.dumps({"file_name": name, "text": text} | columns, ensure_ascii=False) + "\n"


def made(name, text=TEXT, **columns):
    return row(name, text, **MADE | columns)


BOTH = {"a.txt": f"{TEXT}\n", "sub/b.txt": f"{TEXT}\n"}
ALL = made("a.png") + made("sub/b.png")
TABLE, OVERWRITE = {"table": "m.jsonl"}, {"overwrite": True}
ODD = '{ "text":"z",  "file_name":"z.png","n":-1E400,"x":1,"x":[ 2.50 ] }\r\n'
CASES = {  # files before, settings, files after, (captioned, skipped)
    "sidecars": ({}, {}, BOTH, (2, 0)),
    "one is there": ({"a.txt": "mine"}, {}, BOTH | {"a.txt": "mine"}, (1, 1)),
    "an empty file is no caption": ({"a.txt": " \n"}, {}, BOTH, (2, 0)),
    "overwrite keeps what a person wrote": ({"a.txt": "mine"}, OVERWRITE, BOTH | {"a.txt": "mine"}, (1, 0)),
    "overwrite all": ({"a.txt": "mine"}, {"overwrite": "all"}, BOTH, (2, 0)),
    "extension": (
        {"a.txt": "mine"}, {"extension": "caption"},
        {"a.txt": "mine", "a.caption": f"{TEXT}\n", "sub/b.caption": f"{TEXT}\n"}, (2, 0),
    ),
    "prefix": (
        {}, {"prefix": "{folder}: "}, {"a.txt": f"photos: {TEXT}\n", "sub/b.txt": f"sub: {TEXT}\n"}, (2, 0),
    ),
    "thumbnails, hidden files and models are no images": (
        {f"{name}/x.png": "?" for name in ("@eaDir", "__MACOSX", "lost+found", ".git", "model")}
        | {"._a.png": "?", "model/model.safetensors": "?"}, {}, BOTH, (2, 0),
    ),
    "table": ({}, TABLE, {"m.jsonl": ALL}, (2, 0)),
    "table, one is there": (
        {"m.jsonl": row("a.png", "mine")}, TABLE, {"m.jsonl": row("a.png", "mine") + made("sub/b.png")}, (1, 1),
    ),
    "table, killed in a row": ({"m.jsonl": made("a.png") + '{"file_na'}, TABLE, {"m.jsonl": ALL}, (1, 1)),
    "table, no line end": ({"m.jsonl": made("a.png")[:-1]}, TABLE, {"m.jsonl": ALL}, (1, 1)),
    "table, an empty text and other columns": (
        {"m.jsonl": row("z.png", "") + row("a.png", "", split="x")}, TABLE,
        {"m.jsonl": row("z.png", "") + row("a.png", split="x", **MADE) + made("sub/b.png")}, (2, 0),
    ),
    "table, overwrite": (
        {"m.jsonl": row("z.png", "z") + row("a.png", "mine", id=7, probability=0.1)}, TABLE | OVERWRITE,
        {"m.jsonl": row("z.png", "z") + row("a.png", id=7, **MADE) + made("sub/b.png")}, (2, 0),
    ),
    "table, rows of others are kept as they are written, and numbers": (
        {"m.jsonl": ODD + '{"file_name":"a.png","n":1e400, "big": ' + "7" * 5000 + ',"é":"\\u00e9"}\n'}, TABLE,
        {"m.jsonl": ODD + '{"file_name": "a.png", "n": 1e400, "big": ' + "7" * 5000 + ', "é": "é", '
            + made("a.png").partition(", ")[2] + made("sub/b.png")}, (2, 0),
    ),
    "a text in a link": ({"mine": "x"}, {"link": {"a.txt": "gone"}}, BOTH, (2, 0)),
}  # fmt: skip


@pytest.fixture
def photos():
    for name in ("a.png", "sub/b.png"):
        path = Path("photos", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(SAMPLE.read_bytes())
    Path("photos/bad.jpg").write_text("no image")
    return Path("photos")


def files_in(folder):
    """Texts and tables, and what should not be left over; not the hidden tables."""
    kinds = (".txt", ".caption", ".jsonl")
    found = [path for path in folder.rglob("*") if path.suffix in kinds or path.name.startswith(".nanovlm")]
    found = [path for path in found if not path.name.startswith(".captions")]
    return {path.relative_to(folder).as_posix(): path.read_bytes().decode() for path in found}


def run(captioner, folder, settings, again=False):
    settings = dict(settings)
    for name, target in settings.pop("link", {}).items():
        (folder / name).unlink(missing_ok=True) or (folder / name).symlink_to(target) if not again else None
    overwrite = settings.pop("overwrite", False)
    overwrite = overwrite if not again else False
    table, extension = settings.pop("table", None), settings.pop("extension", ".txt")
    output = Table(folder / table, overwrite) if table else Sidecars(extension, overwrite)
    return caption_files(captioner, [folder], output, CaptionOptions(**settings), model="m")


@pytest.mark.parametrize("name", CASES)
def test_a_run_leaves(name, photos, embedded):
    before, settings, after, counts = CASES[name]
    for file, text in before.items():
        (photos / file).parent.mkdir(exist_ok=True)
        (photos / file).write_bytes(text.encode())
    for again in (False, True):
        report = run(embedded, photos, settings, again)
        assert (report.captioned, len(report.skipped)) == ((0, 2) if again else counts)
        assert list(report.failed) == ["photos/bad.jpg"] and files_in(photos) == after


def test_rows_say_what_was_asked_and_a_run_what_others_were_asked(photos, embedded):
    Path("photos/bad.jpg").unlink()
    for settings, columns in (
        ({"choices": ("red", "green")}, {"probability", "log_probability", "prompt"}),
        ({"prompts": ("What?", "Why?")}, {"What?", "Why?"}),
        ({"max_new_tokens": 3}, {"prompt"}),
    ):
        report = run(embedded, photos, settings | {"table": "m.jsonl", "overwrite": True})
        rows = list(map(json.loads, (photos / "m.jsonl").read_text().splitlines()))
        assert columns | {"file_name", "text", "finish_reason", "model"} <= rows[0].keys() and len(rows) == 2
        if "prompts" in settings:
            assert json.loads(rows[0]["text"]) == {name: rows[0][name] for name in columns}
    assert report.cut == {"length": ["photos/a.png", "photos/sub/b.png"]} and rows[0]["finish_reason"] == "length"
    report = caption_files(embedded, [photos], Table("photos/m.jsonl"), CaptionOptions(prompts=("What?",)), model="n")
    assert dict(report.others) == {f"model 'm', prompt {PROMPT!r}": 2}


def hidden(folder="photos"):
    return [json.loads(line) for line in Path(folder, ".captions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("table", [TABLE, {}])
def test_a_run_says_what_made_the_captions_that_it_skips(table, photos, embedded):
    Path("photos/bad.jpg").unlink()
    first = table | {"prefix": "{folder}, "}
    run(embedded, photos, first)
    if not table:
        assert hidden() == [{"file_name": "a.png", **MADE, "prefix": "{folder}, ", "hash": hidden()[0]["hash"]}]
        assert len(hidden()[0]["hash"]) == 16 and [row["file_name"] for row in hidden("photos/sub")] == ["b.png"]
    for changes, words in (
        ({}, ""),
        ({"prefix": "x"}, "prefix '{folder}, '"),
        ({"prefix": ""}, "prefix '{folder}, '"),
        ({"prompts": ("What?",)}, f"prompt {PROMPT!r}"),
        ({"choices": ("red", "green")}, "choices ''"),
    ):
        report = run(lambda: 1 / 0, photos, first | changes)
        assert len(report.skipped) == 2 and dict(report.others) == ({words: 2} if words else {})
    report = run(embedded, photos, table | {"choices": ("red", "green"), "overwrite": True})
    assert report.captioned == 2 and not report.kept
    report = run(lambda: 1 / 0, photos, table | {"choices": ("red", "blue")})
    assert dict(report.others) == {"choices 'red,green'": 2}
    if not table:
        (photos / "a.txt").write_text("mine")
        report = run(lambda: 1 / 0, photos, first)
        assert dict(report.others) == {"prefix '', choices 'red,green'": 1}, "a person's text has no other model"


def test_a_text_that_a_person_edited_is_kept(photos, embedded):
    (photos / "c.png").write_bytes(SAMPLE.read_bytes())
    (photos / "c.txt").write_text("by hand")
    run(embedded, photos, {})
    (photos / "a.txt").write_text("edited")
    (photos / "sub/b.txt").write_bytes(TEXT.encode() + b" \r\n")  # an editor's line end is no edit
    report = run(embedded, photos, OVERWRITE | {"prefix": "x "})
    assert report.kept == ["photos/a.png", "photos/c.png"] and report.captioned == 1
    texts = {"a.txt": "edited", "c.txt": "by hand", "sub/b.txt": f"x {TEXT}\n"}
    assert files_in(photos) == texts
    assert run(embedded, photos, {"overwrite": "all"}).captioned == 3 and not report.failed.get("photos/a.png")
    assert set(files_in(photos).values()) == {f"{TEXT}\n"}
    assert [row["file_name"] for row in hidden()] == ["a.png", "bad.jpg", "c.png"], "a row each"
    assert hidden()[1]["finish_reason"].startswith("failed: not an image")


def test_a_kill_between_a_row_and_its_text_makes_no_text_a_persons(photos, embedded, monkeypatch):
    def killed(path, content):
        raise KeyboardInterrupt

    for old in ({}, BOTH):
        assert files_in(photos) == old
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(files, "replace", killed)
            run(embedded, photos, OVERWRITE | {"prefix": "x "})
        report = run(embedded, photos, OVERWRITE)
        assert report.captioned == 2 and not report.kept
    (photos / "a.txt").write_text("mine")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "replace", killed)
        run(embedded, photos, {"overwrite": "all"})
    assert run(embedded, photos, OVERWRITE).kept == ["photos/a.png"]


def test_a_text_of_an_earlier_run_that_a_person_put_back_is_kept(photos, embedded):
    for prefix in ("x ", ""):
        run(embedded, photos, OVERWRITE | {"prefix": prefix})
    (photos / "a.txt").write_text(f"x {TEXT}")
    assert "old_hash" not in hidden()[0]
    report = run(embedded, photos, OVERWRITE)
    assert report.kept == ["photos/a.png"] and report.captioned == 1


def test_a_text_that_could_not_be_stored_leaves_the_row_of_the_text_that_is_there(photos, embedded, monkeypatch):
    run(embedded, photos, {"prefix": "x "})
    rows = hidden()
    real = files.replace
    with monkeypatch.context() as patch:
        failing = files.FileError("a.txt: Operation not permitted", 1)
        patch.setattr(files, "replace", lambda path, text: fail(failing) if path.name == "a.txt" else real(path, text))
        report = run(embedded, photos, OVERWRITE)
    assert "photos/a.png" in report.failed and report.captioned == 1 and hidden() == rows
    assert run(embedded, photos, OVERWRITE).captioned == 2


def fail(error):
    raise error


def test_failures_of_a_table_are_beside_it_and_tried_again(photos, embedded):
    first, second = (run(embedded, photos, TABLE) for _ in range(2))
    assert list(first.failed) == list(second.failed) == ["photos/bad.jpg"]
    assert (photos / "m.jsonl").read_text() == ALL, "a table has no rows without captions"
    (line,) = (photos / ".m.jsonl.failed").read_text().splitlines()
    row = json.loads(line)
    assert row["file_name"] == "bad.jpg" and row["finish_reason"].startswith("failed: not an image")


@pytest.mark.parametrize("content", ["notes", "link", "pipe", "folder"])
def test_a_hidden_table_that_is_none_is_refused_before_any_work(content, photos):
    path, victim = Path("photos/.captions.jsonl"), Path("victim")
    victim.write_text("mine")
    ways = {"link": lambda: path.symlink_to("../victim"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}
    ways.get(content, lambda: path.write_text("notes"))()
    for name in ("photos/sub/b.png", "photos/bad.jpg"):
        Path(name).unlink()
    (photos / "c.png").write_bytes(SAMPLE.read_bytes())
    words = {"notes": "line 1, is no row", "link": "is a link", "pipe": "a pipe or a device", "folder": "is a folder"}
    with pytest.raises((UsageError, OutputError), match=words[content]):
        run(lambda: 1 / 0, photos, {})
    assert victim.read_text() == "mine" and not (photos / "a.txt").exists()


def test_each_extension_has_a_hidden_table_that_training_does_not_see(photos, embedded):
    Path("photos/bad.jpg").unlink()
    run(embedded, photos, {})
    run(embedded, photos, {"extension": "caption", "prefix": "x "})
    assert {path.name for path in photos.glob(".*")} == {".captions.jsonl", ".captions.caption.jsonl"}
    assert not run(lambda: 1 / 0, photos, {}).others


def test_an_edited_row_of_a_table_is_kept(photos, embedded):
    Path("photos/m.jsonl").write_text(row("a.png", "mine", finish_reason="edited") + made("sub/b.png", "old"))
    report = run(embedded, photos, TABLE | OVERWRITE)
    assert report.kept == ["photos/a.png"] and report.captioned == 1
    assert run(embedded, photos, TABLE | {"overwrite": "all"}).captioned == 2
    assert Path("photos/m.jsonl").read_text() == ALL


def test_two_spellings_of_a_name_are_one_row(photos, embedded):
    (photos / NFD).write_bytes(SAMPLE.read_bytes())
    Path("photos/m.jsonl").write_text(row(NFC, "mine"))
    report = run(embedded, photos, TABLE)
    assert report.skipped == [f"photos/{NFD}"] and report.captioned == 2


QUESTIONS = '{"file_name":"a.png","question":"what?"}\n{"file_name":"a.png","question":"colour?"}\n'
REFUSED = {  # content of the table, and words of the error
    "two questions": (QUESTIONS, "line 2, is one of several rows of a.png"),
    "five captions": ("".join(row("z.png", str(i)) for i in range(5)), "name another file by --out"),
    "two runs joined by hand": (made("a.png", "x") + made("a.png", "y"), "several rows"),
    "a caption of ours for another question": (QUESTIONS[:41] + made("a.png", question="why?"), "several rows"),
    "NFC and NFD": (row(NFC, "1") + row(NFD, "2"), "several rows of"),
    "./": (row("a.png", "1") + row("./a.png", "2"), "several rows of ./a.png"),
    "..": (row("a.png", "1") + row("sub/../a.png", "2"), "several rows"),
    "absolute": (row("a.png", "1") + row("{here}/photos/a.png", "2"), "several rows"),
    "notes": ("buy milk\nand bread", "line 1, is no row"),
    "a note": ("buy milk", "line 1, is no row"),
    "an array over lines": ('[\n{"file_name": "a.png", "text": "x"}\n]', "line 1, is no row"),
    "an array": ('[{"file_name": "a.png", "text": "x"}]\n', "line 1, is no row"),
    "an object over lines": ('{\n"file_name": "a.png"', "line 1, is no row"),
    "CSV": ("file_name,text\na.png,x\n", "line 1, is no row"),
    "no file_name": ('{"a": 1}\n', "line 1, is no row"),
    "a note after rows": (row("a.png") + "to do", "line 2, is no row"),
    "a torn row of another program": (row("a.png") + '{"file_name": "b.png", "caption": "a', "line 2, is no row"),
    "a row with an error": (row("a.png") + '{"file_name": "b.png", "text: 5}', "line 2, is no row"),
    "deep": ("[" * 100_000, "line 1, is no row"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_table_that_is_not_of_captions_is_refused_and_untouched(name, overwrite, photos):
    text, words = REFUSED[name]
    path = Path("photos/m.jsonl")
    path.write_text(text := text.replace("{here}", str(Path.cwd())))
    with pytest.raises(UsageError, match=re.escape(words)):
        run(lambda: 1 / 0, photos, TABLE | {"overwrite": overwrite})
    assert path.read_text() == text and not list(photos.glob(".*"))


@pytest.mark.parametrize("table", [TABLE, {}])
def test_what_is_no_file_is_refused_at_once(table, photos, embedded):
    def put(path, kind):
        path.parent.mkdir(exist_ok=True)
        actions = {
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
            "device": lambda: path.symlink_to("/dev/zero"),
        }
        actions.get(kind, lambda: path.symlink_to(kind))()
        return path

    kinds = {"folder": "folder", "pipe": "pipe", "device": "link|device", "../gone": "link", "bad.jpg": "link"}
    for kind, words in kinds.items() if table else ():
        path = put(Path("photos/m.jsonl"), kind)
        with pytest.raises(UsageError, match=f"m.jsonl.*{words}|Is a directory"):
            run(lambda: 1 / 0, photos, table)
        path.rmdir() if kind == "folder" else path.unlink()
    if not table:
        for name, kind in zip("cdef", ("folder", "pipe", "device", "../photos")):
            put(photos / f"{name}.txt", kind)
            (photos / f"{name}.png").write_bytes(SAMPLE.read_bytes())
        report = run(embedded, photos, {})
        reasons = [report.failed.get(f"photos/{name}.png") for name in "abcdef"]
        assert report.captioned == 2 and [bool(reason) for reason in reasons] == [False, False, *[True] * 4]
        assert all(
            ("a folder" if name in "cf" else "a pipe or a device") in text for name, text in zip("cdef", reasons[2:])
        )


def test_every_beginning_of_a_row_of_ours_is_cut_off():
    line = made('ü "quoted" \\.png', 'é {"x": [1e5]} \n', n=-1.5e-7, is_good=True).encode().rstrip(b"\n")
    assert all(is_torn_row(line[:n]) for n in range(1, len(line)))
    assert not any(
        map(is_torn_row, (line, b"", b"x", b"{}", b'{"file_name": 5', line[:-1].replace(b'"text"', b"text")))
    )


def test_a_write_of_which_a_part_is_stored_is_cut_off_and_the_run_resumed(photos, embedded, monkeypatch):
    real = os.write
    (photos / "bad.jpg").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2] if b"sub/b" in data else data))
        with pytest.raises(OutputError, match=r"m.jsonl: No space left on device; 1 of 2 captions are written; run"):
            run(embedded, photos, TABLE)
    assert (photos / "m.jsonl").read_text() == made("a.png")
    assert run(embedded, photos, TABLE).captioned == 1 and (photos / "m.jsonl").read_text() == ALL


@pytest.mark.parametrize("error", [13, 21, 36])
def test_a_text_that_cannot_be_written_is_a_failure_of_its_image(error, photos, embedded, monkeypatch):
    real = files.replace

    def replace(path, content):
        if path.name == "a.txt":
            raise files.FileError(f"{path}: {os.strerror(error)}", error)
        real(path, content)

    monkeypatch.setattr(files, "replace", replace)
    report = run(embedded, photos, {})
    assert report.captioned == 1 and report.failed["photos/a.png"] == f"photos/a.txt: {os.strerror(error)}"


def test_folders_that_cannot_be_written_are_known_before_any_work(photos, embedded, monkeypatch):
    real = os.access
    closed = {"photos/sub"}
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in closed and real(path, mode))
    report = run(embedded, photos, {})
    assert report.captioned == 1 and "folder cannot be written" in report.failed["photos/sub/b.png"]
    closed.add("photos")
    with pytest.raises(OutputError, match=r"photos/a.png and all others: its folder cannot be written"):
        run(lambda: 1 / 0, photos, {})


def test_prompts_name_the_folder_of_each_image(photos, embedded, monkeypatch):
    asked = []
    real = embedded.requests
    monkeypatch.setattr(
        embedded, "requests", lambda image, prompts, options: asked.extend(prompts) or real(image, prompts, options)
    )
    run(embedded, photos, TABLE | {"prompts": ("Which {folder}?",)})
    rows = list(map(json.loads, Path("photos/m.jsonl").read_text().splitlines()))
    assert sorted(set(asked)) == ["Which photos?", "Which sub?"] == [row["prompt"] for row in rows]


def test_a_schema_may_have_properties_of_our_names(photos, embedded):
    pytest.importorskip("llguidance")
    names = {"file_name": "x.png", "text": "T", "seen": 1}
    schema = {"type": "object", "properties": {name: {"const": value} for name, value in names.items()}}
    run(embedded, photos, TABLE | {"schema": schema | {"required": [*names]}})
    rows = list(map(json.loads, Path("photos/m.jsonl").read_text().splitlines()))
    assert [row["file_name"] for row in rows] == ["a.png", "sub/b.png"] and json.loads(rows[0]["text"]) == names
    assert rows[0]["seen"] == 1


@pytest.mark.parametrize("settings", [{}, TABLE])
def test_one_run_writes_at_a_time(settings, photos, embedded):
    target = photos / "m.jsonl" if settings else photos
    if settings:
        target.touch()
    with files.locked(target), pytest.raises(UsageError, match="another run writes there"):
        run(embedded, photos, settings)
    assert run(embedded, photos, settings).captioned == 2


@pytest.mark.parametrize("order", [("photos", "photos/sub"), ("photos/sub", "photos"), ("photos/link", "photos/sub")])
def test_a_folder_and_its_subfolder_have_one_run_at_a_time(order, photos, embedded):
    Path("photos/link").symlink_to("sub")
    first, second = map(Path, order)

    def load():
        with pytest.raises(UsageError, match="another run writes there"):
            run(lambda: 1 / 0, second, {})
        return embedded

    assert run(load, first, {}).captioned > 0 and run(embedded, second, {}).failed.keys() <= {"photos/bad.jpg"}


def test_two_tables_of_a_folder_are_written_at_once(photos, embedded):
    def load():
        assert run(embedded, photos, {"table": "other.jsonl"}).captioned == 2
        with pytest.raises(UsageError, match="another run writes there"):
            run(embedded, photos, TABLE)
        return embedded

    Path("photos/m.jsonl").write_text(made("a.png"))
    assert run(load, photos, TABLE).captioned == 1


def test_images_that_fail_are_named_and_the_others_captioned(photos, embedded):
    (photos / "nowhere.png").symlink_to("missing")
    os.mkfifo(photos / "pipe.png")
    noise_image(3, 1000).save(photos / "thread.bmp")
    (photos / "a.jpg").write_bytes(SAMPLE.read_bytes())
    (photos / "y.nef").touch()
    (photos / "nothing").mkdir()
    names = [photos, "gone.png", "photos/*.xyz", "photos/sub/../a.png", "photos/**/b.png", photos / "nothing"]
    report = caption_files(embedded, names)
    words = {
        "bad.jpg": "not an image", "nowhere.png": "No such file", "pipe.png": "not a file", "thread.bmp": "crop it",
        "a.png": "a.txt is the caption of a.jpg", "gone.png": "No such file", "*.xyz": "no image matches",
        "nothing": "without images",
    }  # fmt: skip
    reasons = {Path(name).name: reason for name, reason in report.failed.items()}
    assert reasons.keys() == words.keys() and all(words[name] in reason for name, reason in reasons.items())
    assert report.captioned == 2 and report.left_out == {".nef": 1}
    caption_files(embedded, [text := photos / "sub/b.txt"], Sidecars(overwrite=True))
    assert text.read_text() == f"{TEXT}\n", "a caption never replaces its image"
    report = caption_files(embedded, ["photos/pipe.png"], Table("c.jsonl"), CaptionOptions(choices=("red", "green")))
    assert "not a file" in report.failed["photos/pipe.png"]


def test_an_empty_caption_fails_and_the_next_run_tries_again(photos, silent_model, embedded):
    report = run(Captioner.from_pretrained(silent_model), photos, TABLE)
    assert report.failed["photos/a.png"] == "the model's caption is empty" and not Path("photos/m.jsonl").exists()
    assert run(embedded, photos, TABLE).captioned == 2


def test_a_text_that_came_during_the_run_is_kept(photos, embedded):
    def load():
        (photos / "a.txt").write_text("mine")
        return embedded

    assert run(load, photos, {}).captioned == 2 and (photos / "a.txt").read_text() == "mine"


def test_rows_are_those_of_single_answers_in_order_and_read_ahead(embedded):
    images = [noise_image(40 + i, 40, seed=i) for i in range(40)]
    taken = []
    names = ((f"{i}", taken.append(i) or image) for i, image in enumerate(images))
    rows = caption_rows(embedded, names, CaptionOptions(max_new_tokens=6), batch_size=4)
    texts = [next(rows)["text"]]
    assert len(taken) < 20, "not all are read at once"
    texts += [row["text"] for row in rows]
    assert texts == [embedded.caption(image, max_new_tokens=6).strip() for image in images]


@pytest.mark.parametrize("settings", [{}, TABLE])
def test_a_full_disk_or_ctrl_c_loses_nothing_that_was_written(settings, photos, embedded, monkeypatch):
    kind = Table if settings else Sidecars
    write, errors = kind.write, []

    def fails(*args):
        if errors and "text" in args[-1] and (error := errors.pop(0)):
            raise error
        write(*args)

    monkeypatch.setattr(kind, "write", fails)
    errors += [None, OSError(28, "No space left on device")]
    with pytest.raises(OutputError, match=r"No space left on device; 1 of 3 captions are written; run the same"):
        run(embedded, photos, settings)
    (photos / "c.png").write_bytes(SAMPLE.read_bytes())
    errors += [None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        run(embedded, photos, settings)
    assert run(embedded, photos, settings).captioned == 1


@pytest.mark.full  # two processes
@pytest.mark.parametrize("out", ["txt", "photos/m.jsonl"])
def test_kill_9_leaves_whole_captions_and_the_next_run_does_the_rest(out, photos):
    for i in range(200):
        noise_image(40, 40, seed=i).save(photos / f"n{i:03}.png")
    command = [sys.executable, ROOT / "generate.py", photos, "--model", "embedded", "--out", out]
    options = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "stderr": subprocess.PIPE}

    def names():
        lines = Path(out).read_text().splitlines() if out != "txt" and Path(out).exists() else []
        return [json.loads(line)["file_name"] for line in lines if line.endswith("}")] or sorted(photos.rglob("*.txt"))

    with subprocess.Popen(command, **options) as first:
        while len(names()) < 5 and first.poll() is None:
            time.sleep(0.005)
        first.kill()
    n = len(names())
    second = subprocess.run(command, **options)
    assert 5 <= n < 202 and second.returncode == 1 and f"{202 - n} captioned" in second.stderr.decode()
    assert len(set(names())) == len(names()) == 202


@pytest.mark.full  # 14 processes
@pytest.mark.parametrize("out", ["txt", "photos/m.jsonl"])
def test_kill_9_of_overwriting_runs_leaves_one_row_an_image(out, photos):
    for i in range(100):
        noise_image(40, 40, seed=i).save(photos / f"n{i:03}.png")
    (photos / "bad.jpg").unlink()
    names = [f"n{i:03}.png" for i in range(100)]
    odd = '{"file_name": "elsewhere.png", "n": 1e400}\n'
    table = photos / ("m.jsonl" if out != "txt" else ".captions.jsonl")
    command = [sys.executable, ROOT / "generate.py", photos, "--model", "embedded", "--out", out]
    options = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "stderr": subprocess.PIPE}
    table.write_text(odd + "".join(row(name, "old", id=i) for i, name in enumerate(names) if out != "txt"))
    for i in range(12):
        size = table.stat().st_size
        with subprocess.Popen([*command, *["--overwrite"] * (i % 4 != 3)], **options) as process:
            until = time.monotonic() + 4 + i / 4  # a table whose rows change is written now and then
            while process.poll() is None and table.stat().st_size < size + 200 * i and time.monotonic() < until:
                time.sleep(0.002)
            process.kill()
    last = subprocess.run(command, **options)
    assert last.returncode == 0, last.stderr
    lines = table.read_text().splitlines(keepends=True)
    rows = {row["file_name"]: row for row in map(json.loads, lines)}
    assert lines[0] == odd
    assert len(lines) == len(rows) == (103 if out != "txt" else 102) and {
        path.name[:14] for path in photos.glob(".nanovlm*")
    } <= {".nanovlm-part-"}, "parts of killed runs stay for a day"
    if out == "txt":
        texts = [text for name, text in files_in(photos).items() if ".nanovlm-part-" not in name]
        assert len(texts) >= 100 and all(text.endswith("\n") and len(text) > 9 for text in texts)
        last = subprocess.run([*command, "--overwrite"], **options)
        assert b"102 captioned" in last.stderr and b"person" not in last.stderr
    else:
        assert [rows[name]["id"] for name in names] == list(range(100)), "columns that were added by hand stay"
        assert all(row.get("text") for name, row in rows.items() if name != "elsewhere.png")
