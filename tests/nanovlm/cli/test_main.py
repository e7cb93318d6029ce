"""The program itself: verbs, help, how every exception ends; and flags of `nanovlm serve`."""

import argparse
import errno
import io
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import nanovlm
from nanovlm import EMBEDDED
from nanovlm.cli import main as cli
from nanovlm.cli.serve import add_flags, model_name, serve_options
from nanovlm.errors import CheckpointError, DataError, ImageError, InputError, UsageError
from nanovlm.serving.options import ServeOptions
from support import ROOT
from support.cli import assert_usage_error, set_stream

pytestmark = pytest.mark.usefixtures("workdir")


def test_version_help_and_its_examples(nanovlm_program):
    assert nanovlm_program("--version") == (0, f"nanovlm {nanovlm.__version__}\n", "")
    code, out, _ = nanovlm_program("--help")
    assert code == 0 and "\033" not in out
    for verb in cli.VERBS:
        assert f"    {verb} " in out and f"  {cli.import_verb(verb).EXAMPLE.splitlines()[0]}\n" in out
    lines = nanovlm_program("caption", "--help")[1].splitlines()
    assert lines[0] == "usage: nanovlm caption [IMAGE ...] [--FLAG VALUE ...]"
    assert all(line.startswith("  nanovlm caption photo") for line in lines[2:5])
    groups = [line for line in lines if line.endswith(":") and line[0] != " "]
    assert groups == ["files:", "how answers are made:", "the model:", "help:"]


# at most, with -h
N_FLAGS = {"caption": 25, "review": 14, "chat": 12, "train": 39, "evaluate": 25, "export": 10, "serve": 22}


def test_every_flag_has_a_help_text_in_words_flags_are_few_and_an_error_rate_is_none():
    for verb in cli.VERBS:
        parser = cli.Parser(add_help=False)
        cli.add_verb_flags(cli.import_verb(verb), parser)
        assert sum(bool(action.option_strings) for action in parser._actions) <= N_FLAGS[verb]
        for action in parser._actions:
            assert action.help and not any(word in action.help for word in ("True", "False", "None")), action.dest
            assert not (action.metavar == "N" and action.type is float), f"{action.dest} is no whole number"
    parser = cli.Parser(add_help=False)
    cli.add_verb_flags(cli.import_verb("evaluate"), parser)
    args = parser.parse_args(["--data", "d", "--metric", "-my.metrics:cer", "--metric", "f1", "--limit", "3"])
    assert args.metric == ["-my.metrics:cer", "f1"] and args.limit == 3


@pytest.mark.parametrize("argv", [["generate.py"], ["train.py"], ["-m", "nanovlm"]])
def test_help_imports_nothing_heavy(argv):
    """Half a second is for Python itself; torch alone takes longer."""
    command = [sys.executable, "-X", "importtime", *argv, "--help"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.startswith("usage: ")
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in run.stderr.splitlines()}
    assert {"nanovlm", "argparse"} <= imported
    assert not imported & {"torch", "torchvision", "PIL", "numpy", "tokenizers", "jinja2", "huggingface_hub"}


EARLY = [
    "generate.py good.png --model nowhere", "train.py --data . --out o --lr -1", "-m nanovlm chat nowhere.png",
    "-m nanovlm evaluate --data nowhere", "-m nanovlm serve --port 99999",
]  # fmt: skip


@pytest.mark.parametrize("command", EARLY)
def test_wrong_use_is_noticed_before_torch_is_imported(command):
    """Without torch, which takes seconds to import, the message is the same."""
    program, *flags = command.split()
    (Path("blocked") / "torch").mkdir(parents=True)
    Path("blocked/torch/__init__.py").write_text("raise SystemExit('torch was imported')\n")
    path = os.pathsep.join(["blocked", str(ROOT)])
    argv = [sys.executable, program if program == "-m" else str(ROOT / program), *flags]
    result = subprocess.run(argv, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert result.returncode == (1 if "chat" in command else 2), result.stderr
    assert len(result.stderr.splitlines()) == 1 and "torch" not in result.stderr, result.stderr


def test_output_that_cannot_be_written(generate, monkeypatch, tmp_path):
    class FullDisk(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, open("/dev/full", "w") as full:
        set_stream("stdout", full, patch)
        code, _, err = generate("good.png", "fine.jpg")
    assert code == 1 and len(err.splitlines()) == 1 and "No space left" in err
    with monkeypatch.context() as patch:
        set_stream("stderr", FullDisk(), patch)
        code, out, _ = generate("good.png", "missing.png")
    assert code == 1 and len(out.splitlines()) == 1, "messages stop nothing"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert_usage_error(generate("x.png"), "the current folder was deleted")


OURS, THEIRS = (ModuleNotFoundError(f"No module named {name!r}", name=name) for name in ("models.x", "torch"))
ERRORS = [  # error, exit code, the line on standard error
    (KeyboardInterrupt(), 130, ""),
    *((error("bad"), 2, "bad") for error in (UsageError, InputError, DataError, CheckpointError)),
    (ImageError("bad"), 1, "bad"),
    (InputError("0 is too few", field="max_tiles"), 2, "--max-tiles 0 is too few"),
    (InputError("lm_n_heads=0 is too few"), 2, "lm_n_heads=0 is too few"),  # which has no flag
    (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
    (torch.OutOfMemoryError("CUDA out of memory"), 1, "not enough memory; try --dtype bfloat16, .*"),
    (THEIRS, 2, "the Python package torch is missing; .*: pip install -e .*"),
    (OURS, 70, "this is a bug in nanovlm; please report it with the lines above"),
    (ZeroDivisionError("division by zero"), 70, "this is a bug in nanovlm; please report it with the lines above"),
]


@pytest.mark.parametrize(("error", "code", "message"), ERRORS, ids=lambda value: repr(value)[:30])
@pytest.mark.parametrize("debug", ["0", "1"])
def test_every_error_has_an_exit_code_and_one_line(error, code, message, debug, capsys, monkeypatch):
    def verb(args):
        raise error

    monkeypatch.setenv("NANOVLM_DEBUG", debug)
    assert cli.run(Namespace(run=verb, prog="generate.py", max_tiles=None)) == code
    *before, last = capsys.readouterr().err.splitlines() or [""]
    assert re.fullmatch(f"generate.py: {message}" if message else "", last) or (debug == "1" and not message)
    has_traceback = any("Traceback (most recent call last)" in line for line in before)
    assert has_traceback == (code == 70 or (debug == "1" and code != 130))


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return serve_options(parser.parse_args(argv))


def test_flags_of_serve_become_options_and_folders_name_the_model(monkeypatch, tmp_path):
    monkeypatch.delenv("NANOVLM_API_KEY", raising=False)
    assert parse() == ServeOptions()
    monkeypatch.setenv("NANOVLM_API_KEY", "secret")
    options = parse("--max-num-seqs", "3", "--max-pending", "0", "--allow-host", "a", "--allow-host", "b")
    assert (options.max_num_seqs, options.max_pending) == (3, 0)
    assert (options.allow_host, options.api_key) == (["a", "b"], "secret")
    assert parse("--api-key", "other").api_key == "other"
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert {model_name(model) for model in (".", "../mine/", str(tmp_path / "mine"))} == {"mine"}
    assert {model_name(EMBEDDED), model_name(str(EMBEDDED))} == {"nanovlm"}, "as adapters may name it"
    assert model_name("owner/model") == "owner/model"


def test_missing_extra_is_named(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("nanovlm.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", "--device", "cpu"]) == 2 and "pip install 'nanovlm[serve]'" in capsys.readouterr().err
