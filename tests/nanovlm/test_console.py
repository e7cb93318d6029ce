"""What programs print on standard error."""

import io
import logging
import sys
import time

import pytest

from nanovlm.console import TileProgress, bold, configure_logging, for_terminal, print_error, print_remedy, progress_bar
from support.cli import FakeTerminal


@pytest.fixture
def terminal(monkeypatch):
    """Say that standard output and standard error are terminals that can draw, when it is called."""

    def become():
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")

    return become


def test_errors_and_log_lines_appear_once_on_stderr(capsys):
    configure_logging()
    configure_logging()
    print_error("two\nlines")
    logging.getLogger("nanovlm.data.mixture").info("step %d", 3)
    logging.getLogger("models.config").warning("unknown key")
    assert capsys.readouterr() == ("", "two lines\nstep 3\nunknown key\n")


def test_progress_bar_draws_on_terminals_only(capsys, terminal):
    with progress_bar(3, "image") as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""
    terminal()
    with progress_bar(3, "image", desc="captions") as bar:
        bar.update(3)
        print_error("one failed")
    err = capsys.readouterr().err
    assert "captions: 100%" in err and "one failed\n" in err


@pytest.mark.full  # a second, after which the bar appears
def test_a_slow_image_shows_its_tiles_and_a_remedy_on_terminals_only(capsys, terminal):
    def encode():
        tell = TileProgress()
        tell(0, 13)
        time.sleep(1.05)
        for done in range(1, 14):
            tell(done, 13)
        print_remedy(11.2, ["--max-tiles 4", "--quantize int8"])
        print_remedy(9.9, ["--max-tiles 4"])

    encode()
    assert capsys.readouterr().err == ""
    terminal()
    encode()
    err = capsys.readouterr().err
    assert "1/13" in err and "--max-tiles 4: 5 s" in err
    note = "note: this took 11 s; faster, with less detail: --max-tiles 4 or --quantize int8\n"
    assert err.endswith(note) and err.count("note") == 1


def test_bold_only_on_terminals_without_no_color(monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert bold("x", FakeTerminal()) == "\033[1mx\033[0m" and bold("x", io.StringIO()) == "x"
    monkeypatch.setenv("TERM", "dumb")
    assert bold("x", FakeTerminal()) == "x"
    monkeypatch.delenv("TERM")
    monkeypatch.setenv("NO_COLOR", "1")
    assert bold("x", FakeTerminal()) == "x"


def test_control_characters_reach_files_but_no_terminal(capsys, terminal):
    answer = "a\x1b]0;title\x07b\tc\x9bd\n"
    assert for_terminal(answer, sys.stdout) == answer, "a pipe"
    print_error("e\x1b[2J")
    terminal()
    shown = "a?]0;title?b\tc?d\n".replace("?", "\N{REPLACEMENT CHARACTER}")
    assert for_terminal(answer, sys.stdout) == shown
    print_error("e\x1b[2J")
    assert capsys.readouterr().err == "e\x1b[2J\ne\N{REPLACEMENT CHARACTER}[2J\n"
