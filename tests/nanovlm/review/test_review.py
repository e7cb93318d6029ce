"""The review of captions: its API without a browser, and its page in headless Chromium."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from models.common import files
from nanovlm import SAMPLE
from nanovlm.bulk import caption_files
from nanovlm.errors import UsageError
from nanovlm.options import CaptionOptions
from nanovlm.outputs import Sidecars, Table, text_hash
from nanovlm.review.app import Review, make_review_app, marks
from nanovlm.serving.web import Server
from support import noise_image
from support.serving import running, until

pytestmark = pytest.mark.usefixtures("in_tmp_path")

NAMES = ("a.png", "b.png", "sub/c.png")
MADE = {"finish_reason": "stop", "model": "m", "prompt": "p"}


@pytest.fixture(params=["folder", "table"])
def target(request):
    """A folder of three images and their captions, one of which was cut, as text files or as a table."""
    for i, name in enumerate(NAMES):
        path = Path("photos", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        noise_image(400 + i, 300, seed=i).save(path)
    output = Sidecars() if request.param == "folder" else Table("photos/m.jsonl")
    with output.opened(["photos"]):
        for name in NAMES:
            reason = {"finish_reason": "length"} if name == "b.png" else {}
            output.write(f"photos/{name}", {"text": f"a dog, {name}"} | MADE | reason)
    return "photos" if request.param == "folder" else "photos/m.jsonl"


def text_of(target, name):
    if target == "photos":
        return Path("photos", name).with_suffix(".txt").read_text().rstrip("\n")
    rows = [json.loads(line) for line in Path(target).read_text().splitlines()]
    return next(row["text"] for row in rows if row["file_name"] == name)


def set_text(target, name, text):
    if target == "photos":
        Path("photos", name).with_suffix(".txt").write_text(text)
    else:
        Path(target).write_text(Path(target).read_text().replace(f"a dog, {name}", text))


def client(review, token="t"):
    return TestClient(make_review_app(review, token), base_url="http://127.0.0.1:1234", raise_server_exceptions=False)


def change(number, text, old):
    return {"id": number, "text": text, "version": text_hash(old)}


def test_captions_are_listed_with_what_a_person_should_look_at(target):
    api = client(Review(target))
    listed = api.get("/t/captions").json()["captions"]
    assert [(item["name"], item["text"]) for item in listed] == [(name, f"a dog, {name}") for name in NAMES]
    assert [item["marks"] for item in listed] == [[], ["cut"], []]
    assert listed[0]["made"] == "model 'm', prompt 'p'" and listed[2]["folder"] == "sub"
    picture = Image.open(io.BytesIO(api.get("/t/thumbnails/1.jpg").content))
    assert picture.format == "JPEG" and picture.size == (256, 192)
    assert Image.open(io.BytesIO(api.get("/t/images/1.jpg").content)).size == (401, 300)


def test_an_image_on_another_drive_is_listed(target, monkeypatch):
    monkeypatch.setattr(os.path, "relpath", lambda path, start: fail(ValueError("path is on mount 'D:'")))
    (state,) = client(Review(target)).post("/t/captions", json=[change(0, "a cat", "a dog, a.png")]).json()
    assert state["name"] == os.path.abspath("photos/a.png").replace(os.sep, "/")


MARKS = [  # columns of a row, and its mark
    ({}, "empty"), ({"text": " "}, "empty"), ({"text": "a", "finish_reason": "repetition"}, "repeated"),
    ({"text": "the sea and " * 8}, "repeated"), ({"text": "a", "finish_reason": "length"}, "cut"),
    ({"text": "cat", "probability": 0.4}, "improbable"), ({"text": "cat", "probability": 0.9}, ""),
    ({"text": "a", "finish_reason": "edited"}, "edited"),
]  # fmt: skip


def test_marks():
    assert [" ".join(marks(row)) for row, _ in MARKS] == [mark for _, mark in MARKS]


def test_an_edit_is_kept_undone_and_seen_by_the_next_run(target, embedded):
    api = client(Review(target))
    (state,) = api.post("/t/captions", json=[change(1, " a cat \n", "a dog, b.png")]).json()
    assert (state["text"], state["marks"], state["conflict"]) == ("a cat", ["edited"], False)
    assert text_of(target, "b.png") == "a cat"
    output = Sidecars(overwrite=True) if target == "photos" else Table(target, overwrite=True)
    report = caption_files(embedded, [f"photos/{name}" for name in NAMES[:2]], output, CaptionOptions(max_new_tokens=2))
    assert report.kept == ["photos/b.png"] and text_of(target, "b.png") == "a cat"
    (state,) = api.post("/t/undo", json={}).json()
    assert (state["text"], state["marks"]) == ("a dog, b.png", ["cut"]) and text_of(target, "b.png") == "a dog, b.png"
    assert api.post("/t/undo", json={}).json() == []
    (state,) = api.post("/t/captions", json=[change(0, "", text_of(target, "a.png"))]).json()
    assert state["marks"] == ["empty"] and text_of(target, "a.png") == ""


CHANGES = {  # ways in which a cut caption's text becomes another -> its marks then; r: words are replaced in the page
    "r a cat, b.png": ["cut", "edited"],
    "r a cat, b; r a hat, b": ["cut", "edited"],
    "typed a cat, b.png": ["edited"],
    "r a cat; typed a cat runs.": ["edited"],
    "typed a dog runs; r a cat runs": ["edited"],
    "elsewhere a cat": ["edited"],
    "elsewhere a dog; r a cat": ["edited"],
    "typed a cat; elsewhere a dog; typed a hat; undo": ["edited"],
    "r a cat, b.png; undo": ["cut"],
}


@pytest.mark.parametrize("changes", CHANGES)
def test_replaced_words_finish_no_caption_that_was_cut(changes, target):
    if "elsewhere" in changes and target != "photos":
        pytest.skip("a table has no hash of its texts")
    api = client(Review(target))
    for way, _, text in (one.partition(" ") for one in changes.split("; ")):
        if way == "elsewhere":
            set_text(target, "b.png", text)
        elif way == "undo":
            api.post("/t/undo", json={})
        else:
            wanted = [change(1, text, text_of(target, "b.png"))]
            (state,) = api.post("/t/captions", params={"replaced": way == "r"}, json=wanted).json()
            assert not state["conflict"]
    state = client(Review(target)).get("/t/captions").json()["captions"][1]
    assert state["marks"] == CHANGES[changes] and state["made"] == "model 'm', prompt 'p'"


def test_many_are_replaced_at_once_but_not_what_others_changed(target):
    api = client(Review(target))
    set_text(target, "b.png", "mine")
    wanted = [change(i, f"a cat, {name}", f"a dog, {name}") for i, name in enumerate(NAMES)]
    states = api.post("/t/captions", json=wanted).json()
    assert [state["conflict"] for state in states] == [False, True, False] and states[1]["text"] == "mine"
    assert [text_of(target, name) for name in NAMES] == ["a cat, a.png", "mine", "a cat, sub/c.png"]
    set_text(target, "a.png", "mine, too") if target == "photos" else None
    states = api.post("/t/undo", json={}).json()
    assert [state["conflict"] for state in states] == [target == "photos", False]
    assert text_of(target, "sub/c.png") == "a dog, sub/c.png" and text_of(target, "b.png") == "mine"


def test_an_image_is_captioned_again_with_another_prompt_and_its_prefix(target, embedded):
    output = Sidecars(overwrite=True) if target == "photos" else Table(target, overwrite=True)
    caption_files(embedded, ["photos/a.png"], output, CaptionOptions(prefix="x ", max_new_tokens=3))
    old = text_of(target, "a.png")
    api = client(Review(target, load=lambda: embedded, options=CaptionOptions(max_new_tokens=6), model="n"))
    (state,) = api.post("/t/again", json={"id": 0, "prompt": "What?", "version": text_hash(old)}).json()
    assert state["text"] == "x " + embedded.caption("photos/a.png", "What?", max_new_tokens=6).strip()
    assert state["made"] == "model 'n', prompt 'What?', prefix 'x '" and state["marks"] == ["cut"]
    api.post("/t/undo", json={})
    assert text_of(target, "a.png") == old
    for mine in ("mine", ""):  # a text that a person edited, or removed, had the prefix
        api.post("/t/captions", json=[change(0, mine, text_of(target, "a.png"))])
        (state,) = api.post("/t/again", json={"id": 0, "prompt": "Why?", "version": text_hash(mine)}).json()
        assert state["text"] == "x " + embedded.caption("photos/a.png", "Why?", max_new_tokens=6).strip()
    answer = client(Review(target)).post("/t/again", json={"id": 0, "prompt": "What?", "version": text_hash(old)})
    assert answer.status_code == 409 and "--model" in answer.json()["error"]["message"]


def test_a_full_disk_is_one_line(target, monkeypatch):
    review = Review(target)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: fail(OSError(28, "No space left on device")))
        for text in ("a cat", ""):
            answer = client(review).post("/t/captions", json=[change(0, text, "a dog, a.png")])
            message = answer.json()["error"]["message"]
            assert answer.status_code == 409 and message.endswith(": No space left on device"), message
            assert not any(Path("photos").rglob(".nanovlm-part-*"))
    api = client(Review(target))
    text = api.get("/t/captions").json()["captions"][0]["text"]
    assert text == "a dog, a.png"
    (state,) = api.post("/t/captions", json=[change(0, "a hat", text)]).json()
    assert not state["conflict"] and text_of(target, "a.png") == "a hat"


def fail(error):
    raise error


ROWS = {  # columns of ours as another program wrote them
    "a number": '{"file_name":"a.png","text":5}',
    "zero": '{"file_name": "a.png", "text": 0, "id": 1.50}',
    "a float": '{"file_name": "a.png", "text": 1.50, "n": 1e400}',
    "null": '{"file_name": "a.png", "text": null}',
    "no text": '{"file_name": "a.png", "other": [1, 2.0, "3"]}',
    "a label": '{"file_name": "a.png", "text": "7", "choices": 7, "probability": 1, "finish_reason": null}',
    "a list": '{"file_name": "a.png", "text": ["a", {"b": 1E2}], "prompt": false}',
    "a large number": '{"file_name": "a.png", "text": ' + "7" * 5000 + "}",
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("target", ["table"], indirect=True)
def test_undo_puts_back_the_types_of_another_programs_rows(name, target):
    line = ROWS[name]
    odd = '{ "file_name":"z.png",  "text":1E400 }\r\n'
    Path(target).write_bytes((line + "\n" + odd).encode())
    api = client(Review(target))
    old = api.get("/t/captions").json()["captions"][0]
    for text in ("a cat", "", "5"):
        (state,) = api.post("/t/captions", json=[change(0, text, old["text"])]).json()
        if text == old["text"]:
            continue
        assert not state["conflict"] and text_of(target, "a.png") == text
        (state,) = api.post("/t/undo", json={}).json()
        assert state == old | {"conflict": False}
        first, rest = Path(target).read_bytes().split(b"\n", 1)
        exact = {"parse_float": str, "parse_int": str}
        assert json.loads(first, **exact) == json.loads(line, **exact) and rest == odd.encode()


def test_what_a_person_goes_on_typing_is_one_change_and_known_by_its_text(target):
    """And while a run writes there, the page writes nothing."""
    api = client(Review(target))
    status = lambda: api.get("/t/status").json()  # noqa: E731
    assert status() == {"done": 0, "total": 0, "undo": ""}
    sent = "a dog, a.png"
    for text in ("a c", "a cat", "a cat"):  # of the first two the page has no answer yet
        (state,) = api.post("/t/captions", json=[change(0, text, "a dog, a.png") | {"sent": sent}]).json()
        assert state["text"] == text and not state["conflict"]
        sent = text
    assert status() == {"done": 0, "total": 1, "undo": "edit of a.png"}
    wanted = [change(i, "x", text) for i, text in enumerate(("a cat", "a dog, b.png"))]
    api.post("/t/captions?replaced=true", json=wanted)
    assert status() == {"done": 2, "total": 2, "undo": "replacement of 2 captions"}
    api.post("/t/undo", json={})
    with files.locked(target):
        for path, body in (("undo", {}), ("captions", [change(0, "a hat", "a cat")])):
            answer = api.post(f"/t/{path}", json=body)
            assert answer.status_code == 409 and "another run writes there" in answer.json()["error"]["message"]
    (state,) = api.post("/t/undo", json={}).json()
    assert state["text"] == "a dog, a.png" and status()["undo"] == ""


@pytest.mark.parametrize("target", ["table"], indirect=True)
def test_a_table_is_read_once(target, monkeypatch):
    reads = []
    real = files.read_bytes
    monkeypatch.setattr(files, "read_bytes", lambda path, *rest: reads.append(Path(path).name) or real(path, *rest))
    api = client(Review(target))
    api.get("/t/captions")
    for i in range(5):
        api.post("/t/captions", json=[change(0, f"{i}", f"{i - 1}" if i else "a dog, a.png")])
    assert reads == ["m.jsonl"] and text_of(target, "a.png") == "4"
    set_text(target, "b.png", "mine")
    assert api.get("/t/captions").json()["captions"][1]["text"] == "mine" and len(reads) == 2


def test_the_token_is_on_no_command_line():
    noise_image(40, 40).save("a.png")
    program = Path("browser")
    program.write_text("#!/bin/sh\nps -eo args > ps\necho $1 > url\nstat -c %a $(dirname ${1#file://}) >> url\n")
    program.chmod(0o755)
    command = [sys.executable, "-m", "nanovlm", "review", "."]
    options = {"env": os.environ | {"BROWSER": str(program.resolve())}, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as process:
        address = re.search(r"http://[^ ]+", process.stderr.readline())[0]
        until(lambda: Path("url").exists() and len(Path("url").read_text().splitlines()) == 2)
        url, mode = Path("url").read_text().splitlines()
        page = Path(url.removeprefix("file://"))
        assert address.split("/")[3] not in Path("ps").read_text() + url and mode == "700"
        assert f"url={address}" in page.read_text()
        process.terminate()
        process.wait(30)
    assert not page.exists()


REFUSED = {  # method, path, keywords -> status
    "no token": ("GET", "/captions", {}, 404),
    "another token": ("GET", "/u/captions", {}, 404),
    "a host name": ("GET", "/t/captions", {"headers": {"Host": "evil.example"}}, 403),
    "a page elsewhere": ("POST", "/t/undo", {"json": {}, "headers": {"Origin": "http://evil.example"}}, 403),
    "a form": ("POST", "/t/captions", {"content": b"[]", "headers": {"Content-Type": "text/plain"}}, 415),
    "no JSON": ("POST", "/t/captions", {"content": b"[" * 9999, "headers": {"Content-Type": "application/json"}}, 400),
    "an object": ("POST", "/t/captions", {"json": {}}, 400),
    "no change": ("POST", "/t/captions", {"json": [5]}, 400),
    "no text": ("POST", "/t/captions", {"json": [{"id": 0, "version": ""}]}, 400),
    "no such image": ("POST", "/t/captions", {"json": [{"id": 99, "text": "a", "version": ""}]}, 400),
    "a negative number": ("GET", "/t/thumbnails/-1.jpg", {}, 404),
    "not in the list": ("GET", "/t/images/3.jpg", {}, 404),
    "another kind": ("GET", "/t/files/0.jpg", {}, 404),
    "a path": ("GET", "/t/..%2f..%2fetc/passwd", {}, 404),
    "an empty prompt": ("POST", "/t/again", {"json": {"id": 0, "prompt": " ", "version": ""}}, 400),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("target", ["folder"], indirect=True)
def test_only_the_page_reads_and_writes_and_only_what_is_listed(name, target):
    method, path, keywords, status = REFUSED[name]
    assert client(Review(target)).request(method, path, **keywords).status_code == status
    assert text_of(target, "a.png") == "a dog, a.png"


def test_an_image_that_failed_is_listed_with_its_reason_until_it_is_gone(target, embedded):
    Path("photos/bad.jpg").write_text("no image")
    output = Sidecars() if target == "photos" else Table(target)
    caption_files(embedded, ["photos/bad.jpg"], output, CaptionOptions(prefix="x "))
    review = Review(target)
    problems = {state["name"]: state["problem"] for state in client(review).get("/t/captions").json()["captions"]}
    assert problems.pop("bad.jpg") == "not an image of a known format, or a damaged one"
    assert set(problems.values()) == {""}
    number = next(i for i, image in enumerate(review.images) if image.endswith("bad.jpg"))
    noise_image(40, 40).save("photos/bad.jpg")
    api = client(Review(target, load=lambda: embedded, options=CaptionOptions(max_new_tokens=6)))
    (state,) = api.post("/t/again", json={"id": number, "prompt": "What?", "version": text_hash("")}).json()
    assert state["text"].startswith("x ") and not state["problem"]
    os.remove("photos/bad.jpg")
    assert len(Review(target).images) == (3 if target == "photos" else 4)


@pytest.mark.parametrize("target", ["folder"], indirect=True)
def test_what_cannot_be_read_or_written_has_a_reason(target):
    Path("photos/bad.jpg").write_text("no image")
    Path("photos/bad.eps").write_text("%!PS")
    Path("photos/d.png").write_bytes(SAMPLE.read_bytes())
    Path("photos/d.txt").mkdir()
    with pytest.raises(UsageError, match="photos/d.txt has no images"):
        Review("photos/d.txt")
    os.rename("photos/a.png", b"photos/a\xff.png")
    api = client(Review(target))
    states = {state["name"]: state for state in api.get("/t/captions").json()["captions"]}
    assert "is a folder" in states["d.png"]["problem"] and r"a\udcff.png" in states and "bad.eps" not in states
    for answer, words in (
        (api.get(f"/t/thumbnails/{states['bad.jpg']['id']}.jpg"), "not an image"),
        (api.post("/t/captions", json=[change(states["d.png"]["id"], "x", "")]), "is a folder"),
    ):
        assert answer.status_code == 409 and words in answer.json()["error"]["message"]


@pytest.fixture
def open_review(browser):
    """Serves a review in a thread and opens its page; errors of the page's program are failures."""
    problems = []
    with contextlib.ExitStack() as opened:

        def open_review(review, **options):
            url = opened.enter_context(running(Server(make_review_app(review, "t"))))
            page = opened.enter_context(browser.new_context(**options)).new_page()
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(f"{url}/t/")
            page.wait_for_selector("article")
            return page

        yield open_review
    assert not problems


def box(page, name):
    return page.get_by_label(f"Caption of {name}", exact=True)


@pytest.mark.full
@pytest.mark.parametrize("size", [(360, 740), (1280, 800)])
def test_the_page_edits_filters_replaces_undoes_and_captions_again(size, target, embedded, open_review):
    expect = pytest.importorskip("playwright.sync_api").expect
    Path("photos/sub/bad.jpg").write_text("no image")
    if target != "photos":
        with Path(target).open("a") as table:
            table.write('{"file_name": "sub/bad.jpg"}\n')
    review = Review(target, load=lambda: embedded, options=CaptionOptions(max_new_tokens=6, prompts=("What?",)))
    page = open_review(review, viewport=dict(zip(("width", "height"), size)), color_scheme="dark")
    button, label = partial(page.get_by_role, "button"), page.get_by_label
    cards = page.locator("article:visible")
    names = cards.locator(".name").all_inner_texts()
    assert sorted(names) == ["a.png", "b.png", "sub/bad.jpg", "sub/c.png"] and names[:2] == ["sub/bad.jpg", "b.png"]
    expect(page.get_by_text("not an image")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    box(page, "a.png").fill("a cat, <b>a.png</b>")
    page.keyboard.press("Alt+ArrowDown")  # leaves the box
    expect(cards.locator(".mark.edited")).to_have_count(1)
    assert text_of(target, "a.png") == "a cat, <b>a.png</b>"
    expect(box(page, "sub/c.png")).to_be_focused()
    assert size[0] < 1000 or button(name="Undo edit of a.png").evaluate("(e) => e.scrollWidth <= e.clientWidth")
    page.keyboard.press("Escape")

    page.keyboard.press("/")
    page.keyboard.type("DOG")
    expect(cards).to_have_count(2)
    page.get_by_text("Find and replace").click()
    label("Find", exact=True).fill("o")
    label("Replace with").fill("$&0")
    button(name="Replace 2 in 2 captions").click()
    expect(box(page, "sub/c.png")).to_have_value("a d$&0g, sub/c.png")
    expect(page.locator(".mark.cut")).to_have_count(1)  # replaced words finish no sentence
    assert [text_of(target, name) for name in NAMES[1:]] == ["a d$&0g, b.png", "a d$&0g, sub/c.png"]
    button(name="Undo").click()
    expect(box(page, "b.png")).to_have_value("a dog, b.png")
    assert [text_of(target, name) for name in NAMES] == ["a cat, <b>a.png</b>", "a dog, b.png", "a dog, sub/c.png"]

    set_text(target, "sub/c.png", "mine")
    box(page, "sub/c.png").fill("a cat")
    box(page, "b.png").focus()
    expect(page.get_by_text("Changed outside of this page to: “mine”")).to_be_visible()
    assert text_of(target, "sub/c.png") == "mine"
    button(name="Keep mine").click()
    expect(page.get_by_role("status")).to_have_text("Saved")
    assert text_of(target, "sub/c.png") == "a cat"

    label("Filter by words").fill("")
    for kind, value, n in (("mark", "failed", 1), ("mark", "", 4), ("folder", "/sub", 2), ("folder", "", 4)):
        label(f"Filter by {kind}").select_option(value)
        expect(cards).to_have_count(n)
    button(name="More").click()
    label("Prompt to caption").fill("Why?")
    page.keyboard.press("Escape")
    page.locator("article", has=box(page, "b.png")).get_by_role("button", name="Caption again").click()
    expect(box(page, "b.png")).to_have_value(embedded.caption("photos/b.png", "Why?", max_new_tokens=6).strip())
    button(name="Show b.png large").click()
    expect(page.locator("dialog img")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog img")).to_be_hidden()


@pytest.mark.full
def test_tags_are_counted_filtered_added_and_removed(target, open_review):
    expect = pytest.importorskip("playwright.sync_api").expect
    page = open_review(Review(target))
    button, label, texts = partial(page.get_by_role, "button"), page.get_by_label, partial(text_of, target)
    expect(button(name="Undo")).to_be_disabled()
    top = box(page, "a.png").bounding_box()
    button(name="Tags").click()
    expect(page.locator("#chips button")).to_have_text(["a dog 3", "a.png 1", "b.png 1", "sub/c.png 1"])
    label("Tag or trigger word").fill("ohwx")
    label("at the start").check()
    button(name="Add to 3").click()
    expect(button(name="Undo")).to_have_text("Undo replacement of 3 captions")
    assert list(map(texts, NAMES)) == [f"ohwx, a dog, {name}" for name in NAMES]
    expect(button(name="Add to 0")).to_be_disabled()
    button(name="b.png 1").click()
    expect(page.locator("article")).to_have_count(1)
    button(name="Remove from 1").click()
    expect(box(page, "b.png")).to_have_value("ohwx, a dog")
    for name in ("ohwx 3", "Remove from 3"):
        button(name=name).click()
    expect(button(name="Remove from 0")).to_be_disabled()
    assert list(map(texts, NAMES)) == ["a dog, a.png", "a dog", "a dog, sub/c.png"]
    page.keyboard.press("Escape")
    label("Filter by words").fill("x & y")
    expect(page.get_by_text("No caption has “x & y” and the tag “ohwx”")).to_be_visible()
    expect(page.get_by_role("status")).to_be_hidden()
    button(name="Clear the filter").click()
    expect(page.locator("article")).to_have_count(3)
    assert box(page, "a.png").bounding_box() == top, "panels and notes move no card"
    button(name="More").click()
    label("Size of pictures").fill("400")
    expect(page.locator("article img").first).to_have_attribute("src", re.compile("pictures/"))
    assert page.locator("article .picture").first.bounding_box()["width"] == 400


LEAVE = {  # ways to leave the page with words in a box
    "nothing": lambda page: None,
    "the tab is closed": lambda page: page.close(),
    "the browser's question is asked": lambda page: page.close(run_before_unload=True),
    "another page": lambda page: page.goto("about:blank"),
    "reload": lambda page: page.reload(),
    "two saves, one of them on its way": lambda page: (page.evaluate("document.activeElement.blur()"), page.close()),
}


@pytest.mark.full
@pytest.mark.parametrize("way", LEAVE)
def test_typed_words_are_saved_however_the_page_is_left(way, target, open_review):
    page = open_review(Review(target))
    page.on("dialog", lambda dialog: pytest.fail("the browser asks"))
    typed = [" and a cat", " and a bird"] if "two" in way else [" and a cat"]
    for words in typed:
        page.keyboard.press("Escape")
        box(page, "a.png").click()
        page.keyboard.press("End")
        page.keyboard.type(words)
    LEAVE[way](page)
    until(lambda: text_of(target, "a.png") == "a dog, a.png" + "".join(typed))


@pytest.mark.full
@pytest.mark.parametrize("target", ["table"], indirect=True)
def test_a_thousand_cards_are_made_as_they_are_seen(target, open_review):
    expect = pytest.importorskip("playwright.sync_api").expect
    with Path(target).open("a") as table:
        for i in range(1000):
            files.replace(f"photos/{i:04}.png", Path("photos/a.png").read_bytes())
            table.write(json.dumps({"file_name": f"{i:04}.png", "text": f"a dog, {i:04}"}) + "\n")
    page = open_review(Review(target), viewport={"width": 800, "height": 800})
    cards, words = page.locator("article"), page.locator("#words")
    expect(page.locator("#title")).to_contain_text("1,003 of 1,003")
    assert 0 < cards.count() < 100
    cards.locator("textarea").last.focus()
    for _ in range(30):
        page.keyboard.press("Alt+ArrowDown")
    expect(page.locator("textarea:focus")).to_be_in_viewport()
    number = page.locator("article:focus-within").get_attribute("data-id")
    page.locator("textarea:focus").fill("a cat")
    for text in ("dog, 0999", "cat"):
        words.fill(text)
        expect(cards).to_have_count(1)
    expect(cards).to_have_attribute("data-id", number)
    assert "a cat" in Path(target).read_text()
    words.fill("")
    page.get_by_role("button", name="Find and replace").click()
    for field, text in (("#find", "dog"), ("#put", "wolf")):
        page.locator(field).fill(text)
    page.get_by_role("button", name="Replace 1002 in 1002 captions").click()
    expect(page.get_by_role("status")).to_have_text("Saved")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    expect(cards.locator("textarea").last).to_have_value("a wolf, 0999")
