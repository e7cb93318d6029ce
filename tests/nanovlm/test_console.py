"""Standard error and terminals; a busy machine, and memory that is kept."""

import logging
import platform
import subprocess
import sys

import pytest

from nanovlm.console import configure_logging, for_terminal, print_error, progress_bar
from nanovlm.device import busy_note
from support import ROOT


@pytest.fixture
def terminal(monkeypatch):
    """Say that standard output and standard error are terminals that can draw, when it is called."""

    def become():
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")

    return become


def test_errors_and_log_lines_appear_once_on_stderr(capsys, monkeypatch):
    configure_logging()
    configure_logging()
    print_error("two\nlines")
    logging.getLogger("nanovlm.data.mixture").info("step %d", 3)
    logging.getLogger("models.config").warning("unknown\nkey")
    assert capsys.readouterr() == ("", "two lines\nstep 3\nunknown\nkey\n")
    monkeypatch.setattr(sys, "stderr", None)  # as with 2>&-
    print_error("nobody reads this")


def test_progress_bar_draws_on_terminals_only(capsys, terminal):
    for is_terminal in (False, True):
        if is_terminal:
            terminal()
        with progress_bar(3, "image", desc="captions") as bar:
            bar.update(3)
            print_error("one failed")
        err = capsys.readouterr().err
        assert ("captions: 100%" in err) == is_terminal and "one failed\n" in err


def test_control_characters_reach_files_but_no_terminal(capsys, terminal):
    answer = "a\x1b]0;title\x07b\tc\x9bd\n"
    assert for_terminal(answer, sys.stdout) == answer, "a pipe"
    print_error("e\x1b[2J")
    terminal()
    shown = "a?]0;title?b\tc?d\n".replace("?", "\N{REPLACEMENT CHARACTER}")
    assert for_terminal(answer, sys.stdout) == shown
    print_error("e\x1b[2J")
    assert capsys.readouterr().err == "e\x1b[2J\ne\N{REPLACEMENT CHARACTER}[2J\n"


def test_threads_that_wait_for_cores_are_named(monkeypatch):
    for threads, cpu_s, busy in ((2, 2.0, False), (2, 1.5, False), (2, 0.9, True), (1, 0.1, False), (4, 2.0, True)):
        monkeypatch.setattr("torch.get_num_threads", lambda n=threads: n)
        note = busy_note(1.0, cpu_s)
        assert ("faster: --threads 1" in note) == bool(note) == busy


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_kept():
    """Tensors that are made and freed again cost new pages, unless the process keeps them."""
    program = """
import resource, torch
from nanovlm.device import keep_freed_memory
def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**23)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
returned = new_pages()
keep_freed_memory()
print(new_pages() < returned)"""
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT) == b"True\n"
