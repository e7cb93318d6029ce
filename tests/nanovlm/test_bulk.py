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

from nanovlm import SAMPLE, Captioner
from nanovlm.bulk import Sidecars, Table, caption_files, caption_rows
from nanovlm.data.file_lock import file_lock
from nanovlm.errors import OutputError, UsageError
from nanovlm.options import CaptionOptions
from nanovlm.review_page import write_page
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
CASES = {  # files before, settings, files after, (captioned, skipped)
    "sidecars": ({}, {}, BOTH, (2, 0)),
    "one is there": ({"a.txt": "mine"}, {}, BOTH | {"a.txt": "mine"}, (1, 1)),
    "an empty file is no caption": ({"a.txt": " \n"}, {}, BOTH, (2, 0)),
    "overwrite": ({"a.txt": "mine"}, OVERWRITE, BOTH, (2, 0)),
    "extension": (
        {"a.txt": "mine"}, {"extension": "caption"},
        {"a.txt": "mine", "a.caption": f"{TEXT}\n", "sub/b.caption": f"{TEXT}\n"}, (2, 0),
    ),
    "prefix": (
        {}, {"prefix": "{folder}: "}, {"a.txt": f"photos: {TEXT}\n", "sub/b.txt": f"sub: {TEXT}\n"}, (2, 0),
    ),
    "thumbnails, hidden files and models are no images": (
        {f"{name}/x.png": "?" for name in ("@eaDir", "__MACOSX", ".git", "model")}
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
    "table, killed before its rows were joined": (
        {"m.jsonl": row("a.png", "", id=7) + made("a.png") + made("sub/b.png")}, TABLE,
        {"m.jsonl": row("a.png", id=7, **MADE) + made("sub/b.png")}, (0, 2),
    ),
    "table, overwrite": (
        {"m.jsonl": row("z.png", "z") + row("z.png", "y") + row("a.png", "mine", id=7)}, TABLE | OVERWRITE,
        {"m.jsonl": row("z.png", "z") + row("z.png", "y") + row("a.png", id=7, **MADE) + made("sub/b.png")}, (2, 0),
    ),
    "table, several captions of an image": (
        {"m.jsonl": row("a.png", "1") + row("a.png", "2")}, TABLE,
        {"m.jsonl": row("a.png", "1") + row("a.png", "2") + made("sub/b.png")}, (1, 1),
    ),
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
    kinds = (".txt", ".caption", ".jsonl")
    found = [path for path in folder.rglob("*") if path.suffix in kinds or path.name.endswith((".tmp", ".lock"))]
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in found}


def run(captioner, folder, settings, again=False):
    settings = dict(settings)
    overwrite = settings.pop("overwrite", False) and not again
    table, extension = settings.pop("table", None), settings.pop("extension", ".txt")
    output = Table(folder / table, overwrite) if table else Sidecars(extension, overwrite)
    return caption_files(captioner, [folder], output, CaptionOptions(**settings), model="m")


@pytest.mark.parametrize("name", CASES)
def test_a_run_leaves(name, photos, embedded):
    before, settings, after, counts = CASES[name]
    for file, text in before.items():
        (photos / file).parent.mkdir(exist_ok=True)
        (photos / file).write_text(text)
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


def test_two_spellings_of_a_name_are_one_row(photos, embedded):
    (photos / NFD).write_bytes(SAMPLE.read_bytes())
    Path("photos/m.jsonl").write_text(row(NFC, "mine"))
    report = run(embedded, photos, TABLE)
    assert report.skipped == [f"photos/{NFD}"] and report.captioned == 2


def test_an_output_that_cannot_be_written_is_refused_before_any_work(photos):
    table = Path("photos/m.jsonl")
    for prepare, words in (
        (lambda: table.write_text('{"a": 1}\n'), "line 1, is no row"),
        (lambda: table.unlink() or table.mkdir(), "m.jsonl: Is a directory"),
    ):
        prepare()
        with pytest.raises(UsageError, match=words):
            run(lambda: 1 / 0, photos, TABLE)


@pytest.mark.parametrize(("settings", "lock"), [({}, ".captions.lock"), (TABLE, ".m.jsonl.lock")])
def test_one_run_writes_at_a_time(settings, lock, photos, embedded):
    with file_lock(photos / lock, "x"), pytest.raises(UsageError, match="another run writes there"):
        run(embedded, photos, settings)
    (photos / lock).touch()  # of a killed run
    assert run(embedded, photos, settings).captioned == 2


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
        if errors and (error := errors.pop(0)):
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


def test_a_drive_that_refuses_chmod_takes_captions(photos, embedded, monkeypatch):
    def refuse(*args, **more):
        raise PermissionError(1, "Operation not permitted")

    for name in ("os.chmod", "os.fchmod", "os.fsync", "pathlib.Path.chmod"):
        monkeypatch.setattr(name, refuse)
    Path("photos/m.jsonl").write_text(row("a.png", ""))
    assert run(embedded, photos, TABLE).captioned == run(embedded, photos, {}).captioned == 2


def test_a_page_shows_what_to_look_at_first(photos):
    names = ["photos/a.png", "photos/bad.jpg", *(f"photos/{i}.png" for i in range(4))]
    noise_image(4000, 3000).save("photos/0.png")
    texts = ["x </script>", "", "the same", "the same", "a " * 20, "cut"]
    rows = [{"text": text, "finish_reason": "length" if text == "cut" else "stop"} for text in texts]
    write_page("r.html", names, rows, {"photos/bad.jpg": "not an image"})
    page = Path("r.html").read_text()
    assert "http" not in page and "6 images; 1 empty; 1 repeated; 1 cut; 2 identical" in page
    shown = re.findall(r"<article>(.*?)<p>(?:<b>(.*?)</b> )?(.*?)<br><small>(.*?)</small>", page)
    assert [name for *_, name in shown] == [names[i] for i in (1, 4, 5, 2, 3, 0)]
    assert [note for _, note, *_ in shown] == ["empty", "repeated", "cut", *["identical to 1 others"] * 2, ""]
    assert shown[0][2] == "not an image" and shown[-1][2] == "x &lt;/script&gt;"
    assert [len(image) > 500 for image, *_ in shown] == [False, False, False, True, False, True]
    assert max(len(image) for image, *_ in shown) < 8000


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
