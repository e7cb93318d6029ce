"""What the evaluation commands share, and that each of them prints its help."""

import importlib
import json
import os
import runpy
import sys

import pytest
import torch

from eval.lib.command import add_threads_flag, make_parser, one_of, positive, report
from support import ROOT

COMMANDS = sorted(path.stem for path in (ROOT / "eval").glob("*.py") if "sys.exit(main())" in path.read_text("utf-8"))


def test_the_commands_are_the_questions_that_users_ask():
    assert COMMANDS == ["benchmark", "captions", "finetune", "latency", "real_size", "serving", "sort_task", "speedup"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_help(name, capsys, monkeypatch):
    if name == "serving":
        pytest.importorskip("openai")
    monkeypatch.setattr("sys.argv", ["command", "--help"])
    monkeypatch.delitem(sys.modules, f"eval.{name}", raising=False)  # or runpy warns that it is imported already
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"eval.{name}", run_name="__main__")
    out = capsys.readouterr().out
    assert end.value.code == 0 and out.startswith(f"usage: eval.{name} ") and f"python -m eval.{name}" in out


def test_results_are_printed_as_text_or_as_one_object_with_failures(capsys):
    assert report({"share": 0.5}, "half of it", "a machine", as_json=False) == 0
    assert capsys.readouterr() == ("half of it\na machine\n", "")
    assert report({"share": 0.5}, "half of it", "a machine", as_json=True, failures=["too few"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"share": 0.5, "failures": ["too few"], "environment": "a machine"} and err == "too few\n"


def test_every_command_takes_a_number_of_threads(capsys, monkeypatch):
    for name in COMMANDS:
        if name == "serving":
            pytest.importorskip("openai")
        with pytest.raises(SystemExit, match="2"):
            importlib.import_module(f"eval.{name}").main(["--threads", "0"])
        assert "0 must be auto or a number from 1 to 1024" in capsys.readouterr().err


def test_threads_are_those_of_this_process_and_of_later_ones(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    add_threads_flag(parser := make_parser("name", "what it is"))
    before = torch.get_num_threads()
    try:
        assert parser.parse_args(["--threads", "2"]).threads == torch.get_num_threads() == 2
        assert os.environ["OMP_NUM_THREADS"] == "2"
        torch.set_num_threads(1)
        assert parser.parse_args([]).threads == torch.get_num_threads() == 1  # auto raises nothing
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--n", "0"], "--n: 0 must be 1 or more"), (["--n", "x"], "'x'"), (["b", "c"], "'c' is none of 'a', 'b'")],
)
def test_wrong_numbers_and_names_are_one_line(argv, message, capsys):
    parser = make_parser("name", "what it is")
    parser.add_argument("--n", type=positive)
    parser.add_argument("names", nargs="*", type=one_of(["a", "b"]))
    assert parser.parse_args([]).names == [] and parser.parse_args(["b", "--n", "3"]).n == 3
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(argv)
    err = capsys.readouterr().err
    assert err.startswith("eval.name: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("benchmark --contexts 2", "--contexts 2: each must be from 3 to 2048"),
        ("benchmark --contexts 2049", "--contexts 2049"),
        ("benchmark --out no/where.txt", "--out no/where.txt"),
        ("captions --turns 21", "--turns 21 is more than 20"),
        ("captions --model no/where/at/all", "no/where/at/all"),
        ("finetune --profile --baseline trl", "--profile and --baseline exclude each other"),
        ("finetune sideways", "sideways"),
        ("latency --baselines vllm", "vllm"),
        ("latency --model-size 230M --model folder", "not allowed with"),
        ("latency --model no/where/near", "no/where/near"),
        ("latency --level amx-emulated", "this CPU has no level amx-emulated; use "),
        ("latency --threads many", "--threads many must be auto or a number"),
        ("real_size 7B", "7B"),
        pytest.param("serving --clients 1", "2 or more", marks=pytest.mark.full),
        pytest.param("serving --model no/where/at/all", "no/where/at/all", marks=pytest.mark.full),
        ("sort_task --steps 0", "0 must be 1 or more"),
    ],
)
def test_wrong_use_of_a_command_is_one_line_and_exit_code_2(command, message, capsys):
    name, *flags = command.split()
    if name == "serving":
        pytest.importorskip("openai")
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"eval.{name}").main(flags)
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1
