"""How exceptions end the program: a message, and the exit code."""

import pytest
import torch

from nanovlm.captioner import Captioner
from nanovlm.cli import main as cli
from nanovlm.errors import CompileError, DataError, ImageError, InputError, UsageError

pytestmark = pytest.mark.usefixtures("standing")


@pytest.fixture
def failing(generate, monkeypatch):
    """generate.py whose model raises an error while it loads."""

    def run(error, *argv):
        def from_pretrained(*args, **options):
            raise error

        monkeypatch.setattr(Captioner, "from_pretrained", from_pretrained)
        return generate("good.png", *argv)

    return run


@pytest.mark.parametrize("error", [UsageError("bad flag"), DataError("bad row"), CompileError("no compiler")])
def test_user_errors_are_one_line_and_their_exit_code(failing, error):
    assert failing(error) == (error.exit_code, "", f"generate.py: {error}\n")


def test_input_and_image_errors_exit_with_1():
    assert (InputError.exit_code, ImageError.exit_code) == (1, 1)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_out_of_memory_is_one_line_with_a_way_out(failing, error):
    code, out, err = failing(error)
    assert (code, out) == (1, "") and len(err.splitlines()) == 1
    assert "not enough memory" in err and "--dtype bfloat16" in err


def test_a_bug_keeps_its_traceback(failing):
    code, out, err = failing(ZeroDivisionError("division by zero"))
    assert (code, out) == (70, "")
    assert "Traceback (most recent call last)" in err and "ZeroDivisionError" in err
    assert err.splitlines()[-1].startswith("generate.py: this is a bug in nanovlm; please report it")


def test_debug_shows_the_traceback_of_user_errors(failing, monkeypatch):
    code, _, err = failing(UsageError("bad flag"), "--debug")
    assert code == 2 and "Traceback" in err and err.splitlines()[-1] == "generate.py: bad flag"
    monkeypatch.setenv("NANOVLM_DEBUG", "1")
    assert "Traceback" in failing(UsageError("bad flag"))[2]
    monkeypatch.setenv("NANOVLM_DEBUG", "0")
    assert "Traceback" not in failing(UsageError("bad flag"))[2]


@pytest.mark.parametrize("argv", [["good.png"], ["missing.jpg", "--json"], ["."]])
def test_an_image_in_place_of_a_verb_is_a_suggestion(argv, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.endswith(f"did you mean: nanovlm caption {' '.join(argv)}\n")
