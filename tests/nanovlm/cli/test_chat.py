"""`nanovlm chat`: questions and commands, piped in and typed."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovlm.chat_session import ChatSession
from nanovlm.data import ReadOptions, open_source
from support import ROOT
from support.cli import FAST_FLAGS, assert_usage_error, set_stdin
from support.data import pairs_of
from support.generation import prompt_of

pytestmark = pytest.mark.usefixtures("workdir")


@pytest.fixture
def chat(model_folder, run_script, monkeypatch):

    def chat(lines, *argv, model=model_folder):
        set_stdin(lines.encode("utf-8", "surrogateescape"), monkeypatch)
        return run_script("chat", "chat", *FAST_FLAGS, "--model", model, *argv)

    return chat


def test_each_line_is_answered_by_a_line(chat, random_captioner):
    session = ChatSession(random_captioner, ["good.png"])
    questions, flags = ["What is it?", "And now?", "Où? 🙂"], ["--temperature", "1.5", "--seed", "4"]
    settings = {"max_new_tokens": 6, "temperature": 1.5, "seed": 4}
    answers = ["".join(session.ask(question, **settings)) for question in questions]
    assert chat("\n".join(questions) + "\n\n", "good.png", *flags) == (0, "".join(f"{text}\n" for text in answers), "")
    assert chat("Hello?\n")[0] == 0, "without an image, too"


def test_commands_change_images_and_reset_history(chat):
    Path("fine.jpg").rename("fine two.jpg")
    more = ["--max-new-tokens", "16"]
    shown = (["fine two.jpg"], ["good.png", "fine two.jpg"], ["good.png"])
    alone, both, first = (chat("Describe it.\n", *names, *more)[1] for names in shown)
    assert len({alone, both, first}) == 3
    commands = ["", "/image fine two.jpg\n", "/image good.png 'fine two.jpg'\n", "/reset\n", ""]
    assert chat("Describe it.\n".join(commands), "good.png", *more) == (0, first + alone + both + both, "")


def test_chat_is_saved_as_text_and_as_training_data(chat):
    Path("saved").mkdir()
    lines = "What?\n/save saved/chat.json\nAnd <b>?\n/save saved/chat.json\n/save chat.txt\n"
    code, out, err = chat(lines, "good.png", "fine.jpg")
    kinds = ["1 questions and answers as JSON that `nanovlm train --data` reads"]
    kinds += [kinds[0].replace("1", "2"), "2 questions and answers as plain text"]
    assert code == 0 and [line.split(": ")[1] for line in err.splitlines()] == kinds
    first, second = out.splitlines()
    assert Path("chat.txt").read_text() == f"good.png\nfine.jpg\n\n> What?\n{first}\n\n> And <b>?\n{second}\n"
    (record,) = json.loads(Path("saved/chat.json").read_text())
    assert record["images"] == ["../good.png", "../fine.jpg"]
    assert [m["content"] for m in record["messages"]] == ["What?", first, "And <b>?", second]
    assert [m["role"] for m in record["messages"]] == ["user", "assistant"] * 2
    example = open_source("saved/chat.json", ReadOptions())[0]
    assert [question for question, _ in pairs_of(example)] == ["What?", "And <b>?"] and len(example.images) == 2


@pytest.mark.parametrize("name", ["two words.png", "ünï-🙂.png", "two\nlines.png", os.fsdecode(b"\xff.png")])
def test_unusual_image_names_are_opened_and_saved(chat, name):
    Path("good.png").rename(name)
    code, out, err = chat("What?\n/save chat.txt\n/save chat.json\n", name)
    assert code == 0 and len(err.split(": ")) == 3 and Path("chat.txt").read_bytes().startswith(os.fsencode(name))
    assert json.loads(Path("chat.json").read_text())[0]["images"] == [name]
    if "\n" not in name:  # which ends a line
        assert chat(f"/image {name}\nWhat?\n") == (0, out, "")


FAILING = {  # lines -> words of the error
    "/image .": "a folder, not an image", "/image": "/image needs a path", "/save": "/save needs a name",
    "/image missing.png": "missing.png: No such file", "/image 'x": "No closing quotation",
    "/help": "/help is not a command: /image FILE", "/save good.png": "good.png exists already",
    "/save no/where.txt": "/save no/where.txt: No such file or directory; name a folder",
    "ξ" * 1100: "shorten it, or reset the chat",
    "I a\udcff?": r"'a\udcff?' is not valid Unicode text",
}  # fmt: skip


@pytest.mark.parametrize("lines", FAILING, ids=lambda lines: ascii(lines[:9]))
def test_failed_line_is_one_error_line_and_the_chat_continues(chat, lines):
    good = Path("good.png").read_bytes()
    answer = chat("What?\n", "good.png")[1]
    code, out, err = chat(f"{lines}\nWhat?\n", "good.png")
    assert (code, out) == (1, answer) and FAILING[lines] in err and len(err.splitlines()) == 1
    assert Path("good.png").read_bytes() == good


def test_chat_that_cannot_start_is_one_error_line(chat, changed_model):
    Path("bad.png").touch()
    for name, words in (("missing.png", "No such file or directory"), ("bad.png", "an empty file")):
        assert chat("?\n", name) == (1, "", f"{name}: {words}\n")
    result = chat("?\n", "good.png", model=changed_model(lm_chat_template=None))
    assert_usage_error(result, "no lm_chat_template", "one at a time", program="chat")


def test_a_full_context_is_one_line_with_a_way_on(chat, random_captioner):
    question = "word"
    while len(prompt_of(random_captioner.processor, [], question)[0]) < 1020:
        question += " word"
    code, _, err = chat(question + "\n", "--max-new-tokens", "256")
    assert code == 0 and "context of 1,024 tokens; /reset forgets" in err


@pytest.mark.full
def test_terminal_has_prompt_and_exit(model_folder):
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "nanovlm", "chat", "good.png", "--model", str(model_folder), *FAST_FLAGS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    run = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=environment)
    os.close(slave)
    shown = b""
    for typed in (b"What is it?\n", b"\x04"):
        while not shown.endswith((b"\n> ", b"\r> ")) and shown != b"> ":
            shown += os.read(master, 4096)
        os.write(master, typed)
        shown += b"|"
    with contextlib.suppress(OSError):  # Linux raises EIO once the other end is closed
        while chunk := os.read(master, 4096):
            shown += chunk
    assert run.wait(60) == 0 and b"ctrl-d leaves" in run.stderr.read()
    os.close(master)
