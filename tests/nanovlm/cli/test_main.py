"""The program itself: verbs, help, and how every exception ends."""

import errno
import io
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import nanovlm
from nanovlm.cli import main as cli
from nanovlm.errors import CheckpointError, DataError, ImageError, InputError, UsageError
from support import ROOT
from support.cli import assert_usage_error, set_stream

pytestmark = pytest.mark.usefixtures("workdir")


@pytest.mark.parametrize("command", ["", "paint", "--unknown", "caption --unknown", "train --recipe x"])
def test_wrong_verbs_and_flags_are_one_error_line(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(command.split())
    program = "nanovlm train" if "train" in command else "nanovlm"
    assert_usage_error((end.value.code, *capsys.readouterr()), program=program)


@pytest.mark.parametrize("argv", [["generate.py"], ["train.py"], ["-m", "nanovlm"]])
def test_help_imports_nothing_heavy(argv):
    """Half a second is for Python itself; torch alone takes longer."""
    program = "from nanovlm.cli.main import main; main(['--help'])" if argv[0] == "-m" else None
    command = ["-c", program] if program else [*argv, "--help"]
    run = subprocess.run([sys.executable, "-X", "importtime", *command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.startswith("usage: ")
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in run.stderr.splitlines()}
    assert {"nanovlm", "argparse"} <= imported
    assert not imported & {"torch", "torchvision", "PIL", "numpy", "tokenizers", "jinja2", "huggingface_hub"}


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"nanovlm {nanovlm.__version__}\n"


def test_full_disk_is_one_error_line(generate, monkeypatch):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        set_stream("stdout", full, monkeypatch)
        code, _, err = generate("good.png", "fine.jpg")
    assert code == 1 and len(err.splitlines()) == 1 and "No space left" in err


def test_messages_that_cannot_be_written_stop_nothing(generate, monkeypatch):
    class FullDisk(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    set_stream("stderr", FullDisk(), monkeypatch)
    code, out, _ = generate("good.png", "missing.png")
    assert code == 1 and len(out.splitlines()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows deletes no current folder")
def test_a_deleted_current_folder_is_one_line(generate, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert_usage_error(generate("x.png"), "the current folder was deleted")


def test_help_shows_every_verb_with_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out, verbs = capsys.readouterr().out, {verb: cli.import_verb(verb) for verb in cli.VERBS}
    assert all(
        f"    {verb} " in out and f"  {module.EXAMPLE.splitlines()[0]}\n" in out for verb, module in verbs.items()
    )
    assert "\033" not in out


@pytest.fixture
def failing(capsys):
    """generate.py whose verb raises an error."""

    def run(error):
        def verb(args):
            raise error

        return cli.run(Namespace(run=verb, prog="generate.py", max_tiles=None)), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        *((error("bad"), 2, "generate.py: bad\n") for error in (UsageError, InputError, DataError, CheckpointError)),
        (ImageError("bad"), 1, "generate.py: bad\n"),
        (InputError("max_tiles=0 is too few"), 2, "generate.py: --max-tiles 0 is too few\n"),
        (InputError("lm_n_heads=0 is too few"), 2, "generate.py: lm_n_heads=0 is too few\n"),  # which has no flag
    ],
    ids=repr,
)
def test_errors_of_users_are_one_line_with_the_flag_of_the_setting_and_have_an_exit_code(failing, error, code, message):
    assert failing(error) == (code, "", message)


def test_out_of_memory_is_one_line_with_a_way_out(failing):
    code, out, err = failing(torch.OutOfMemoryError("CUDA out of memory"))
    assert (code, out) == (1, "") and len(err.splitlines()) == 1
    assert "not enough memory" in err and "--dtype bfloat16" in err


def test_a_missing_package_is_one_line_with_a_way_out(failing):
    code, _, err = failing(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert code == 2 and "package torch is missing" in err and "pip install -e " in err and len(err.splitlines()) == 1
    assert failing(ModuleNotFoundError("No module named 'models.x'", name="models.x"))[0] == 70


def test_a_bug_keeps_its_traceback(failing):
    code, out, err = failing(ZeroDivisionError("division by zero"))
    assert (code, out) == (70, "")
    assert "Traceback (most recent call last)" in err and "ZeroDivisionError" in err
    assert err.splitlines()[-1].startswith("generate.py: this is a bug in nanovlm; please report it")


def test_debug_shows_the_traceback_of_user_errors(generate, failing, monkeypatch):
    monkeypatch.setenv("NANOVLM_DEBUG", "1")
    code, _, err = generate("good.png", model="nowhere")
    assert code == 2 and "Traceback" in err and err.splitlines()[-1].startswith("generate.py: --model nowhere must be")
    assert "Traceback" in failing(UsageError("bad flag"))[2]
    monkeypatch.setenv("NANOVLM_DEBUG", "0")
    assert "Traceback" not in failing(UsageError("bad flag"))[2]


@pytest.mark.parametrize("argv", [["good.png"], ["missing.jpg", "--json"], ["."]])
def test_an_image_in_place_of_a_verb_is_a_suggestion(argv, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.endswith(f"did you mean: nanovlm caption {' '.join(argv)}\n")


@pytest.mark.parametrize(
    "verb",
    [["train", "--data", "."], ["export", "nowhere"], ["export", "nowhere", "--gguf"]],
    ids=["train", "export", "gguf"],
)
@pytest.mark.parametrize(("out", "words"), [("", "--out"), ("good.png", "is a file")])
def test_every_verb_checks_its_output_folder_first(capsys, verb, out, words):
    assert cli.main([*verb, "--out", out]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "--out" in err and words in err


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_flag_has_a_help_text_in_words(verb):
    parser = cli.Parser(add_help=False)
    cli.add_verb_flags(cli.import_verb(verb), parser)
    for action in parser._actions:
        assert action.help and not any(word in action.help for word in ("True", "False", "None")), action.dest
        assert not (action.metavar == "N" and action.type is float), f"{action.dest} is no whole number"


@pytest.mark.parametrize(
    "command",
    [
        "generate.py good.png --model nowhere", "train.py --data . --out o --lr -1", "-m nanovlm chat nowhere.png",
        "-m nanovlm evaluate --data nowhere", "-m nanovlm serve --port 99999",
    ],
)  # fmt: skip
def test_wrong_use_is_noticed_before_torch_is_imported(command):
    """Without torch, which takes seconds to import, the message is the same."""
    program, *flags = command.split()
    (Path("blocked") / "torch").mkdir(parents=True)
    Path("blocked/torch/__init__.py").write_text("raise SystemExit('torch was imported')\n")
    path = os.pathsep.join(["blocked", str(ROOT)])
    argv = [sys.executable, *(["-m", flags.pop(0)] if program == "-m" else [str(ROOT / program)]), *flags]
    result = subprocess.run(argv, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert result.returncode == (1 if "chat" in command else 2), result.stderr
    assert len(result.stderr.splitlines()) == 1 and "torch" not in result.stderr, result.stderr
