"""`nanovlm chat`: what is answered on a cache is what is answered anew, and a picture is looked at once."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.decoding import SamplingParams
from nanovlm import Captioner
from nanovlm.chat_session import ChatSession
from nanovlm.cli import main as cli
from nanovlm.console import bold
from nanovlm.data import ReadOptions, open_source
from support import ROOT, noise
from support.cli import SHORT, read_or_end, refused, stdin_of

pytestmark = pytest.mark.usefixtures("standing")

QUESTIONS = ["What is this?", "How many are there? <|image|>", "?", "And where is the ring, if there is any?", "?"]


@pytest.fixture(params=["one tile", "many tiles"])
def captioner(request, speaker, tiled):
    return Captioner(*(speaker if request.param == "one tile" else tiled))


@pytest.fixture
def chat(model_folder, capsys, monkeypatch):
    """nanovlm chat in this process, with what is piped into it: exit code, stdout, stderr."""

    def chat(heard, *argv, model=model_folder):
        stdin_of(heard.encode("utf-8", "surrogateescape"), monkeypatch)
        try:
            code = cli.main(["chat", *SHORT, "--model", str(model), *map(str, argv)])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return chat


def anew(conversation, question, history, **options):
    """The answer of one who reads the whole chat again, and again for every token."""
    captioner = conversation.captioner
    ids = captioner.processor.encode_prompt(conversation.grids, question, history)
    columns = captioner.model.generate(
        torch.tensor([ids]),
        conversation.images,
        eos_token_id=captioner.tokenizer.eos_token_id,
        use_kv_cache=False,
        **options,
    )
    said = columns[0].tolist()
    return captioner.tokenizer.decode(said[:-1] if said[-1] == captioner.tokenizer.eos_token_id else said)


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.5, seed=4, repetition_penalty=1.3)]
)
def test_every_turn_is_answered_as_if_all_were_read_anew(captioner, n, sampling):
    conversation = ChatSession(captioner, [noise(50, 30, seed) for seed in range(n)])
    options = {"max_new_tokens": 7, "sampling": sampling}
    for turn, question in enumerate(QUESTIONS):
        before = list(conversation.history)
        said = "".join(conversation.ask(question, **options))
        assert said == anew(conversation, question, before, **options)
        assert conversation.history == [*before, (question, said)] and len(before) == turn


def test_a_picture_is_encoded_once_and_turns_read_only_what_is_new(captioner, monkeypatch):
    conversation, looked = ChatSession(captioner, [noise(50, 30)]), []
    encode = captioner.model.vision_encoder.forward
    monkeypatch.setattr(captioner.model.vision_encoder, "forward", lambda x: looked.append(len(x)) or encode(x))
    read, tokenizer = [], captioner.tokenizer
    for _ in range(8):
        assert "".join(conversation.ask("?", max_new_tokens=6)) == conversation.history[-1][1]
        read.append(conversation.tokens_read)
    assert looked == [len(conversation.images)]
    turn = (
        len(captioner.processor.encode_prompt([], "?")) + 8
    )  # a question in its template, and the template's end of an answer
    longest = max(len(tokenizer.encode(answer)) for _, answer in conversation.history)
    assert read[0] == len(captioner.processor.encode_prompt(conversation.grids, "?"))
    assert max(read[1:]) <= turn + longest, "of the last answer at most, and nothing older"


def test_who_stops_listening_can_go_on_asking(captioner):
    conversation = ChatSession(captioner, [noise(50, 30)])
    pieces = conversation.ask("What?", max_new_tokens=30)
    heard = next(pieces) + next(pieces)
    pieces.close()
    assert conversation.history == [("What?", heard)]
    said = "".join(conversation.ask("Why?", max_new_tokens=7))
    assert said == anew(conversation, "Why?", [("What?", heard)], max_new_tokens=7)


def test_reset_forgets_what_was_said_and_not_what_was_seen(captioner, monkeypatch):
    conversation = ChatSession(captioner, [noise(50, 30)])
    first = ["".join(conversation.ask(question, max_new_tokens=7)) for question in QUESTIONS[:3]]
    conversation.reset()
    monkeypatch.setattr(captioner.model.vision_encoder, "forward", lambda x: pytest.fail("looked again"))
    assert ["".join(conversation.ask(question, max_new_tokens=7)) for question in QUESTIONS[:3]] == first


def test_a_chat_too_long_says_so_and_can_be_reset(captioner):
    conversation = ChatSession(captioner)
    with pytest.raises(ValueError, match="lm_max_position_embeddings=1024; shorten it, or reset the chat"):
        next(conversation.ask("ξ" * 1100))
    assert conversation.history == []
    assert len("".join(conversation.ask("ξ" * 480, max_new_tokens=500))) >= 0, "an answer takes what room there is"


# ------------------------------------------------------------------------------------------------------------- the verb


def test_each_line_is_answered_by_a_line(chat, model_folder):
    captioner = Captioner.from_pretrained(model_folder, "cpu", "float32")
    conversation = ChatSession(captioner, ["good.png"])
    asked = ["What is it?", "And now?", "Où? 🙂"]
    said = ["".join(conversation.ask(question, max_new_tokens=6)) for question in asked]
    assert chat("\n".join(asked) + "\n\n", "good.png") == (0, "".join(f"{text}\n" for text in said), "")
    assert chat("Hello?\n")[0] == 0, "without a picture, too"


def test_commands_change_what_is_talked_about(chat):
    Path("fine.jpg").rename("fine two.jpg")
    more = ["--max-new-tokens", "16"]
    _, alone, _ = chat("Describe it.\n", "fine two.jpg", *more)
    _, both, _ = chat("Describe it.\n", "good.png", "fine two.jpg", *more)
    _, said, _ = chat("Describe it.\n", "good.png", *more)
    assert len({alone, both, said}) == 3
    asked = ["", "/image fine two.jpg\n", "/image good.png 'fine two.jpg'\n", "/reset\n"]
    code, out, err = chat("Describe it.\n".join([*asked, "/help\n"]), "good.png", *more)
    assert (code, out) == (0, said + alone + both + both)
    assert all(f"/{word} " in err for word in ("image", "reset", "save", "help"))


def test_a_chat_is_saved_as_text_and_as_what_can_be_learned_from(chat):
    Path("saved").mkdir()
    heard = "What?\n/save saved/chat.json\nAnd <b>?\n/save saved/chat.json\n/save chat.txt\n"
    code, _, err = chat(heard, "good.png", "fine.jpg")
    assert (code, err) == (0, "")
    first, second = Path("chat.txt").read_text().split("\n> ")[1:]
    assert Path("chat.txt").read_text().startswith("good.png\nfine.jpg\n")
    answers = [first.removeprefix("What?\n").strip("\n"), second.removeprefix("And <b>?\n").strip("\n")]
    (record,) = json.loads(Path("saved/chat.json").read_text())
    assert record["images"] == ["../good.png", "../fine.jpg"]
    assert [m["content"] for m in record["messages"]] == ["What?", answers[0], "And <b>?", answers[1]]
    example = open_source("saved/chat.json", ReadOptions())[0]
    assert [question for question, _ in example.answers] == ["What?", "And <b>?"] and len(example.pictures) == 2


@pytest.mark.parametrize("name", ["two words.png", "ünï-🙂.png", "two\nlines.png", os.fsdecode(b"\xff.png")])
def test_pictures_of_all_names_are_talked_about_and_saved(chat, name):
    Path("good.png").rename(name)
    code, out, err = chat("What?\n/save chat.txt\n/save chat.json\n", name)
    assert (code, err) == (0, "") and Path("chat.txt").read_bytes().startswith(os.fsencode(name))
    assert json.loads(Path("chat.json").read_text())[0]["images"] == [name]
    if "\n" not in name:  # which ends a line
        assert chat(f"/image {name}\nWhat?\n") == (0, out, "")


@pytest.mark.parametrize(
    ("heard", "words"),
    [
        ("/image .", "a folder, not a picture"),
        ("/paint", "/paint is no command; /help"),
        ("/image", "/image wants a picture"),
        ("/image missing.png", "missing.png: No such file"),
        ("/image 'x", "No closing quotation"),
        ("/save", "/save wants a name"),
        ("/save good.png", "good.png exists already"),
        ("/save no/where.txt", "No such file"),
        ("ξ" * 1100, "reset the chat"),
        ("a\udcff", "not valid Unicode text"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_the_chat_goes_on(chat, heard, words):
    good = Path("good.png").read_bytes()
    _, said, _ = chat("What?\n", "good.png")
    code, out, err = chat(f"{heard}\nWhat?\n", "good.png")
    assert (code, out) == (1, said) and words in err and len(err.splitlines()) == 1
    assert Path("good.png").read_bytes() == good


def test_a_chat_that_cannot_begin_is_one_line(chat, model_folder, tmp_path):
    assert chat("?\n", "missing.png") == (1, "", "missing.png: No such file or directory\n")
    for flags, words in (
        (["--max-new-tokens", "0"], "--max-new-tokens 0 is less than 1"),
        (["--top-p", "2"], "top_p=2.0"),
    ):
        refused(chat("?\n", *flags), words, program="nanovlm chat")
    refused(chat("?\n", "--nonsense"), "--nonsense", program="nanovlm")
    (folder := tmp_path / "model").mkdir()
    for path in model_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    del raw["lm_chat_template"]
    (folder / "config.json").write_text(json.dumps(raw))
    refused(chat("?\n", "good.png", model=folder), "no lm_chat_template", "one at a time", program="nanovlm chat")


def test_a_terminal_has_a_prompt_a_memory_and_a_way_out(model_folder, tmp_path):
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    program = "import sys; from nanovlm.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "chat", "good.png", "--model", str(model_folder), *SHORT]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    run = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=environment)
    os.close(slave)
    shown = b""
    while not shown.endswith(b"> "):
        shown += os.read(master, 4096)
    os.write(master, b"What is it?\n")
    while not shown.endswith(b"\n> ") and not shown.endswith(b"\r> "):
        shown += os.read(master, 4096)
    os.write(master, b"\x04")
    while chunk := read_or_end(master):
        shown += chunk
    assert run.wait(60) == 0 and b"ctrl-d leaves" in run.stderr.read() and b"\033[1m" not in shown
    assert (tmp_path / "state/nanovlm/history").read_text().splitlines() == ["What is it?"]
    os.close(master)


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert bold("x", Terminal()) == "\033[1mx\033[0m" and bold("x", io.StringIO()) == "x"
    monkeypatch.setenv("TERM", "dumb")
    assert bold("x", Terminal()) == "x"
    monkeypatch.delenv("TERM")
    monkeypatch.setenv("NO_COLOR", "1")
    assert bold("x", Terminal()) == "x"


def test_help_shows_every_verb_with_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"    {verb} " in out and f"  {module.EXAMPLE}\n" in out for verb, module in cli.VERBS.items())
    assert "\033" not in out


def test_a_shell_can_complete(tmp_path):
    pytest.importorskip("argcomplete")
    line, answer = "nanovlm caption --exi", tmp_path / "answer"
    environment = os.environ | {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    environment |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_IFS": "\n", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", "from nanovlm.cli.main import main; main()"], env=environment, timeout=60)
    assert answer.read_text().strip() == "--existing"
