"""Captions of folders: files before, flags, files after, counts. A second run changes nothing."""

import json
import os
import re
import subprocess
import sys
import time
import unicodedata
from contextlib import nullcontext
from pathlib import Path

import pytest

from models.common import files
from nanovlm import SAMPLE, Captioner
from nanovlm.bulk import caption_files, caption_rows
from nanovlm.errors import OutputError, UsageError
from nanovlm.options import CaptionOptions
from nanovlm.outputs import Sidecars, Table, is_torn_row
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
TABLE, OVERWRITE, X = {"table": "m.jsonl"}, {"overwrite": True}, {"prefix": "x "}
ODD = '{ "text":"z",  "file_name":"z.png","n":-1E400,"x":1,"x":[ 2.50 ] }\r\n'
MINE = row("a.png", "mine")
CAPTIONS = {"a.caption": f"{TEXT}\n", "sub/b.caption": f"{TEXT}\n"}
NO_IMAGES = "@eaDir/x.png __MACOSX/x.png lost+found/x.png .git/x.png ._a.png model/x.png model/model.safetensors"
CASES = {  # files before, settings, files after, (captioned, skipped)
    "sidecars": ({}, {}, BOTH, (2, 0)),
    "one is there": ({"a.txt": "mine"}, {}, BOTH | {"a.txt": "mine"}, (1, 1)),
    "an empty file is no caption": ({"a.txt": " \n"}, {}, BOTH, (2, 0)),
    "overwrite keeps what a person wrote": ({"a.txt": "mine"}, OVERWRITE, BOTH | {"a.txt": "mine"}, (1, 0)),
    "overwrite all": ({"a.txt": "mine"}, {"overwrite": "all"}, BOTH, (2, 0)),
    "extension": ({"a.txt": "mine"}, {"extension": "caption"}, {"a.txt": "mine"} | CAPTIONS, (2, 0)),
    "prefix": ({}, {"prefix": "{folder}: "}, {"a.txt": f"photos: {TEXT}\n", "sub/b.txt": f"sub: {TEXT}\n"}, (2, 0)),
    "thumbnails, hidden files and models are no images": (dict.fromkeys(NO_IMAGES.split(), "?"), {}, BOTH, (2, 0)),
    "killed in a row of the hidden table": ({".captions.jsonl": made("z.png") + '{"file_na'}, {}, BOTH, (2, 0)),
    "a text in a link": ({"mine": "x"}, {"link": {"a.txt": "gone"}}, BOTH, (2, 0)),
}
B = made("sub/b.png")
BIG = "7" * 5000
TABLES = {  # the table before, whether it is overwritten, the table after, (captioned, skipped)
    "new": ("", False, ALL, (2, 0)),
    "one is there": (MINE, False, MINE + B, (1, 1)),
    "killed in a row": (made("a.png") + '{"file_na', False, ALL, (1, 1)),
    "no line end": (made("a.png")[:-1], False, ALL, (1, 1)),
    "an empty text and other columns": (
        row("z.png", "") + row("a.png", "", split="x"), False,
        row("z.png", "") + row("a.png", split="x", **MADE) + B, (2, 0),
    ),
    "overwritten": (
        row("z.png", "z") + row("a.png", "mine", id=7, probability=0.1), True,
        row("z.png", "z") + row("a.png", id=7, **MADE) + B, (2, 0),
    ),
    "rows of others are kept as they are written, and numbers": (
        ODD + '{"file_name":"a.png","n":1e400, "big": ' + BIG + ',"é":"\\u00e9"}\n', False,
        ODD + f'{{"file_name": "a.png", "n": 1e400, "big": {BIG}, "é": "é", ' + ALL.partition(", ")[2], (2, 0),
    ),
}  # fmt: skip
CASES |= {
    f"table, {name}": ({"m.jsonl": text} if text else {}, TABLE | {"overwrite": is_over}, {"m.jsonl": after}, counts)
    for name, (text, is_over, after, counts) in TABLES.items()
}


@pytest.fixture
def photos():
    write(Path("photos"), {"a.png": SAMPLE, "sub/b.png": SAMPLE, "bad.jpg": "no image"})
    return Path("photos")


def files_in(folder):
    """Texts and tables, and what should not be left over; not the hidden tables."""
    kinds = (".txt", ".caption", ".jsonl")
    found = [path for path in folder.rglob("*") if path.suffix in kinds or path.name.startswith(".nanovlm")]
    found = [path for path in found if not path.name.startswith(".captions")]
    return {path.relative_to(folder).as_posix(): path.read_bytes().decode() for path in found}


def run(captioner, folder, settings, again=False):
    settings = dict(settings)
    folder = Path(settings.pop("folder", folder))
    for name, target in settings.pop("link", {}).items():
        (folder / name).symlink_to(target) if not again else None
    overwrite = settings.pop("overwrite", False)
    overwrite = overwrite if not again else False
    table, extension = settings.pop("table", None), settings.pop("extension", ".txt")
    model = settings.pop("model", "m")
    output = Table(folder / table, overwrite) if table else Sidecars(extension, overwrite)
    return caption_files(captioner, [folder], output, CaptionOptions(**settings), model=model)


def write(photos, files):
    """Write texts, and images where SAMPLE stands."""
    for name, text in files.items():
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(SAMPLE.read_bytes() if text is SAMPLE else text.encode())


@pytest.mark.parametrize("name", CASES)
def test_a_run_leaves(name, photos, embedded):
    before, settings, after, counts = CASES[name]
    write(photos, before)
    for again in (False, True):
        report = run(embedded, photos, settings, again)
        assert (report.captioned, len(report.skipped)) == ((0, 2) if again else counts)
        assert list(report.failed) == ["photos/bad.jpg"] and files_in(photos) == after


THREE = BOTH | {"c.txt": "by hand"}
EDITED, SPELLED = row("a.png", "mine", finish_reason="edited"), row(NFC, "mine")
RUNS = {  # runs in turn, of each: what a person writes before it, settings, (captioned, images kept), files after
    "texts that a person wrote or edited; an editor's line end is no edit": [
        ({"c.png": SAMPLE, "c.txt": "by hand"}, {}, (2, ""), THREE),
        ({"a.txt": "edited", "sub/b.txt": f"{TEXT} \r\n"}, OVERWRITE | X, (1, "a.png c.png"),
         THREE | {"a.txt": "edited", "sub/b.txt": f"x {TEXT}\n"}),
        ({}, {"overwrite": "all"}, (3, ""), dict.fromkeys(THREE, f"{TEXT}\n")),
    ],
    "a text of an earlier run that a person put back": [
        ({}, OVERWRITE | X, (2, ""), dict.fromkeys(BOTH, f"x {TEXT}\n")), ({}, OVERWRITE, (2, ""), BOTH),
        ({"a.txt": f"x {TEXT}"}, OVERWRITE, (1, "a.png"), BOTH | {"a.txt": f"x {TEXT}"}),
    ],
    "an edited row of a table": [
        ({"m.jsonl": EDITED + made("sub/b.png", "old")}, TABLE | OVERWRITE, (1, "a.png"), {"m.jsonl": EDITED + B}),
        ({}, TABLE | {"overwrite": "all"}, (2, ""), {"m.jsonl": ALL}),
    ],
    "two spellings of a name": [({NFD: SAMPLE, "m.jsonl": SPELLED}, TABLE, (2, ""), {"m.jsonl": SPELLED + ALL})],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_texts_of_people_are_kept(name, photos, embedded):
    for written, settings, (captioned, kept), after in RUNS[name]:
        write(photos, written)
        report = run(embedded, photos, settings)
        assert (report.captioned, report.kept) == (captioned, [f"photos/{image}" for image in kept.split()])
        assert list(report.failed) == ["photos/bad.jpg"] and files_in(photos) == after


def test_hidden_tables_have_a_row_an_image_and_each_extension_its_own(photos, embedded):
    for settings in ({}, {"overwrite": "all", "model": "n"}, X | {"extension": "caption"}):
        run(embedded, photos, settings)
    assert [row["file_name"] for row in hidden()] == ["a.png", "bad.jpg"]
    assert hidden()[1]["finish_reason"].startswith("failed: not an image")
    assert {path.name for path in photos.glob(".*")} == {".captions.jsonl", ".captions.caption.jsonl"}
    assert dict(run(embedded, photos, {}).others) == {"model 'n'": 2}


def test_rows_say_what_was_asked_and_why_answers_ended(photos, embedded):
    Path("photos/bad.jpg").unlink()
    for settings, columns in (
        ({"choices": ("red", "green")}, {"probability", "log_probability", "prompt"}),
        ({"prompts": ("What?", "Why?")}, {"What?", "Why?"}),
        ({"max_new_tokens": 3}, {"prompt"}),
    ):
        report = run(embedded, photos, TABLE | OVERWRITE | settings)
        rows = rows_of()
        assert columns | {"file_name", "text", "finish_reason", "model"} <= rows[0].keys() and len(rows) == 2
        if "prompts" in settings:
            assert json.loads(rows[0]["text"]) == {name: rows[0][name] for name in columns}
    assert report.cut == {"length": ["photos/a.png", "photos/sub/b.png"]} and rows[0]["finish_reason"] == "length"


def hidden(folder="photos"):
    return rows_of(f"{folder}/.captions.jsonl")


@pytest.mark.parametrize("table", [TABLE, {}])
def test_a_run_says_what_made_the_captions_that_it_skips(table, photos, embedded):
    def others(settings):
        report = run(lambda: 1 / 0, photos, table | settings)
        assert len(report.skipped) == 2
        return dict(report.others)

    Path("photos/bad.jpg").unlink()
    first, choices = {"prefix": "{folder}, "}, {"choices": ("red", "green")}
    run(embedded, photos, table | first)
    if not table:
        assert hidden() == [{"file_name": "a.png", **MADE, **first, "hash": hidden()[0]["hash"]}]
        assert len(hidden()[0]["hash"]) == 16 and [row["file_name"] for row in hidden("photos/sub")] == ["b.png"]
    assert others(first) == {}
    assert others({"prefix": "x"}) == others({}) == {"prefix '{folder}, '": 2}
    assert others(first | {"prompts": ("What?",)}) == {f"prompt {PROMPT!r}": 2}
    assert others(first | choices) == {"choices ''": 2}
    report = run(embedded, photos, table | choices | OVERWRITE)
    assert report.captioned == 2 and not report.kept
    assert others({"choices": ("red", "blue")}) == {"choices 'red,green'": 2}
    if not table:
        (photos / "a.txt").write_text("mine")
        assert others(first) == {"prefix '', choices 'red,green'": 1}, "a person's text has no other model"


def test_a_kill_between_a_row_and_its_text_makes_no_text_a_persons(photos, embedded, monkeypatch):
    def run_killed(settings):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(files, "replace", lambda path, content: fail(KeyboardInterrupt()))
            run(embedded, photos, settings)

    for old in ({}, BOTH):
        assert files_in(photos) == old
        run_killed(OVERWRITE | X)
        report = run(embedded, photos, OVERWRITE)
        assert report.captioned == 2 and not report.kept
    (photos / "a.txt").write_text("mine")
    run_killed({"overwrite": "all"})
    assert run(embedded, photos, OVERWRITE).kept == ["photos/a.png"]


@pytest.mark.parametrize("error", [1, 13, 21, 36])
def test_a_text_that_cannot_be_stored_is_a_failure_of_its_image_and_leaves_its_row(
    error, photos, embedded, monkeypatch
):
    run(embedded, photos, X)
    rows, real = hidden(), files.replace
    failing = files.FileError(f"photos/a.txt: {os.strerror(error)}", error)
    with monkeypatch.context() as patch:
        patch.setattr(files, "replace", lambda path, text: fail(failing) if path.name == "a.txt" else real(path, text))
        report = run(embedded, photos, OVERWRITE)
    assert report.captioned == 1 and report.failed["photos/a.png"] == str(failing) and hidden() == rows
    assert run(embedded, photos, OVERWRITE).captioned == 2


def fail(error):
    raise error


def test_failures_of_a_table_are_beside_it_and_tried_again(photos, embedded):
    for _ in range(2):
        assert list(run(embedded, photos, TABLE).failed) == ["photos/bad.jpg"]
    assert (photos / "m.jsonl").read_text() == ALL, "a table has no rows without captions"
    (row,) = rows_of("photos/.m.jsonl.failed")
    assert row["file_name"] == "bad.jpg" and row["finish_reason"].startswith("failed: not an image")


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


PUT = {
    "folder": Path.mkdir, "pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to("bad.jpg"), "dangling link": lambda path: path.symlink_to("../gone"),
    "notes": lambda path: path.write_text("notes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUT)
@pytest.mark.parametrize("name", ["m.jsonl", ".captions.jsonl"])
def test_what_is_no_table_is_refused_before_any_work(name, kind, photos):
    PUT[kind](photos / name)
    (photos / "sub/b.png").unlink()
    words = {"notes": "line 1, is no row", "device": "link|device", "folder": "is a folder|Is a directory"}
    with pytest.raises((UsageError, OutputError), match=f"{name}.*({words.get(kind, kind.split()[-1])})"):
        run(lambda: 1 / 0, photos, TABLE if name == "m.jsonl" else {})
    assert not (photos / "a.txt").exists() and Path("photos/bad.jpg").read_text() == "no image"


def test_texts_that_are_no_files_fail_alone(photos, embedded):
    for name, kind in zip("cdef", ("folder", "pipe", "device", "link to a folder")):
        (PUT | {kind: lambda path: path.symlink_to("../photos")} if "to" in kind else PUT)[kind](photos / f"{name}.txt")
        (photos / f"{name}.png").write_bytes(SAMPLE.read_bytes())
    report = run(embedded, photos, {})
    assert report.captioned == 2 and report.failed.pop("photos/bad.jpg") and len(report.failed) == 4
    for name, words in zip("cdef", ("a folder", "a pipe or a device", "a pipe or a device", "a folder")):
        assert words in report.failed[f"photos/{name}.png"]


def test_every_beginning_of_a_row_of_ours_is_cut_off():
    line = made('ü "quoted" \\.png', 'é {"x": [1e5]} \n', n=-1.5e-7, is_good=True).encode().rstrip(b"\n")
    assert all(is_torn_row(line[:n]) for n in range(1, len(line)))
    other = (line, b"", b"x", b"{}", b'{"file_name": 5', line[:-1].replace(b'"text"', b"text"))
    assert not any(map(is_torn_row, other))


def test_a_write_of_which_a_part_is_stored_is_cut_off_and_the_run_resumed(photos, embedded, monkeypatch):
    real = os.write
    (photos / "bad.jpg").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2] if b"sub/b" in data else data))
        with pytest.raises(OutputError, match=r"m.jsonl: No space left on device; 1 of 2 captions are written; run"):
            run(embedded, photos, TABLE)
    assert (photos / "m.jsonl").read_text() == made("a.png")
    assert run(embedded, photos, TABLE).captioned == 1 and (photos / "m.jsonl").read_text() == ALL


def test_folders_that_cannot_be_written_are_known_before_any_work(photos, embedded, monkeypatch):
    real = os.access
    closed = {"photos/sub"}
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in closed and real(path, mode))
    report = run(embedded, photos, {})
    assert report.captioned == 1 and "folder cannot be written" in report.failed["photos/sub/b.png"]
    closed.add("photos")
    with pytest.raises(OutputError, match=r"photos/a.png and all others: its folder cannot be written"):
        run(lambda: 1 / 0, photos, {})


def rows_of(path="photos/m.jsonl"):
    return list(map(json.loads, Path(path).read_text().splitlines()))


def test_prompts_name_the_folder_of_each_image(photos, embedded, monkeypatch):
    asked, real = [], embedded.requests
    requests = lambda image, prompts, options: asked.extend(prompts) or real(image, prompts, options)  # noqa: E731
    monkeypatch.setattr(embedded, "requests", requests)
    run(embedded, photos, TABLE | {"prompts": ("Which {folder}?",)})
    assert sorted(set(asked)) == ["Which photos?", "Which sub?"] == [row["prompt"] for row in rows_of()]


def test_a_schema_may_have_properties_of_our_names(photos, embedded):
    pytest.importorskip("llguidance")
    names = {"file_name": "x.png", "text": "T", "seen": 1}
    schema = {"type": "object", "properties": {name: {"const": value} for name, value in names.items()}}
    run(embedded, photos, TABLE | {"schema": schema | {"required": [*names]}})
    rows = rows_of()
    assert [row["file_name"] for row in rows] == ["a.png", "sub/b.png"] and json.loads(rows[0]["text"]) == names
    assert rows[0]["seen"] == 1


SUB, OTHER = {"folder": "photos/sub"}, {"table": "other.jsonl"}
AT_ONCE = [  # settings of a run, of another while it loads its model, and whether both write
    ({}, {}, False), ({}, SUB, False), (SUB, {}, False), ({"folder": "photos/link"}, SUB, False),
    (TABLE, TABLE, False), (TABLE, OTHER, True),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "is_free"), AT_ONCE)
def test_a_folder_and_a_table_have_one_run_at_a_time(first, second, is_free, photos, embedded):
    def load():
        with nullcontext() if is_free else pytest.raises(UsageError, match="another run writes there"):
            assert run(embedded, photos, second).captioned == 2
        return embedded

    Path("photos/link").symlink_to("sub")
    assert run(load, photos, first).captioned > 0 and run(embedded, photos, second).failed.keys() <= {"photos/bad.jpg"}


FAILING = {  # names -> words of the reason
    "bad.jpg": "not an image", "nowhere.png": "No such file", "pipe.png": "not a file", "thread.bmp": "crop it",
    "a.png": "a.txt is the caption of a.jpg", "gone.png": "No such file", "*.xyz": "no image matches",
    "nothing": "without images",
}  # fmt: skip


def test_images_that_fail_are_named_and_the_others_captioned(photos, embedded):
    (photos / "nowhere.png").symlink_to("missing")
    os.mkfifo(photos / "pipe.png")
    noise_image(3, 1000).save(photos / "thread.bmp")
    write(photos, {"a.jpg": SAMPLE, "y.nef": ""})
    (photos / "nothing").mkdir()
    names = [photos, "gone.png", "photos/*.xyz", "photos/sub/../a.png", "photos/**/b.png", photos / "nothing"]
    report = caption_files(embedded, names)
    assert len(report.images) == len({*map(os.path.realpath, report.images)}), "each once"
    reasons = {Path(name).name: reason for name, reason in report.failed.items()}
    assert reasons.keys() == FAILING.keys() and all(FAILING[name] in reason for name, reason in reasons.items())
    assert report.captioned == 2 and report.left_out == {".nef": 1}
    caption_files(embedded, [text := photos / "sub/b.txt"], Sidecars(overwrite=True))
    assert text.read_text() == f"{TEXT}\n", "a caption never replaces its image"
    report = caption_files(embedded, ["photos/pipe.png"], Table("c.jsonl"), CaptionOptions(choices=("red", "green")))
    assert "not a file" in report.failed["photos/pipe.png"]


def test_an_empty_caption_fails_and_a_text_that_came_during_the_run_is_kept(photos, silent_model, embedded):
    report = run(Captioner.from_pretrained(silent_model), photos, TABLE)
    assert report.failed["photos/a.png"] == "the model's caption is empty" and not Path("photos/m.jsonl").exists()
    assert run(embedded, photos, TABLE).captioned == 2

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


@pytest.mark.full  # 14 processes
@pytest.mark.parametrize("out", ["txt", "photos/m.jsonl"])
def test_kill_9_leaves_whole_captions_and_one_row_an_image(out, photos):
    names = [f"n{i:03}.png" for i in range(100)]
    for i, name in enumerate(names):
        noise_image(40, 40, seed=i).save(photos / name)
    (photos / "bad.jpg").unlink()
    command = [sys.executable, ROOT / "generate.py", photos, "--model", "embedded", "--out", out]
    options = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "stderr": subprocess.PIPE, "text": True}
    odd = '{"file_name": "elsewhere.png", "n": 1e400}\n'
    table = photos / ("m.jsonl" if out != "txt" else ".captions.jsonl")
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
    assert len(lines) == len(rows) == (103 if out != "txt" else 102)
    parts = {path.name[:14] for path in photos.glob(".nanovlm*")}
    assert parts <= {".nanovlm-part-"}, "parts of killed runs stay for a day"
    if out == "txt":
        texts = [text for name, text in files_in(photos).items() if ".nanovlm-part-" not in name]
        assert len(texts) >= 100 and all(text.endswith("\n") and len(text) > 9 for text in texts)
        last = subprocess.run([*command, "--overwrite"], **options)
        assert "102 captioned" in last.stderr and "person" not in last.stderr
    else:
        assert [rows[name]["id"] for name in names] == list(range(100)), "columns that were added by hand stay"
        assert all(row.get("text") for name, row in rows.items() if name != "elsewhere.png")
