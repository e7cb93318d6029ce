"""What the evaluation commands share, and that each of them prints its help."""

import importlib
import json
import os

import pytest
import torch

from eval.lib.command import add_threads_flag, file_name, make_parser, report
from eval.lib.cpu_levels import levels_here
from eval.lib.hardware import cpu_name
from support import ROOT

COMMANDS = sorted(path.stem for path in (ROOT / "eval").glob("*.py") if "sys.exit(main())" in path.read_text("utf-8"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_help_and_takes_a_number_of_threads(name, capsys):
    command = importlib.import_module(f"eval.{name}")
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: eval.{name} ") and f"python -m eval.{name}" in out
    with pytest.raises(SystemExit, match="2"):
        command.main(["--threads", "0"])
    assert "0 must be 1 or more" in capsys.readouterr().err


def test_results_are_printed_as_text_or_as_one_object_with_failures(capsys):
    assert report({"share": 0.5}, "half of it", "a machine", as_json=False) == 0
    assert capsys.readouterr() == ("half of it\na machine\n", "")
    assert report({"share": 0.5}, "half of it", "a machine", as_json=True, failures=["too few"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"share": 0.5, "failures": ["too few"], "environment": "a machine"} and err == "too few\n"


def test_saved_output_is_appended_below_its_command_to_the_processors_file(tmp_path, capsys):
    for text in ("first", "second"):
        report({}, text, "a machine", as_json=False, save=tmp_path / "new")
    (path,) = (tmp_path / "new").iterdir()
    assert path.stem == file_name([cpu_name(), *levels_here()[-1:]])
    lines = path.read_text().splitlines()
    assert lines[1:3] == ["first", "a machine"] and lines[5:] == ["second", "a machine", ""]
    assert lines[0] == lines[4] and lines[0].startswith("$ python ")
    assert file_name(["Intel(R) Xeon(R) Platinum 8488C", "amx"]) == "intel-xeon-platinum-8488c-amx"
    assert file_name(["AMD EPYC", "avx2-vnni"]) == "amd-epyc-avx2-vnni" and file_name(["aarch64"]) == "aarch64"


def test_threads_are_those_of_this_process_and_of_later_ones(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    add_threads_flag(parser := make_parser("name", "what it is"))
    before = torch.get_num_threads()
    try:
        assert parser.parse_args(["--threads", "2"]).threads == torch.get_num_threads() == 2
        assert os.environ["OMP_NUM_THREADS"] == "2"
        torch.set_num_threads(1)
        assert parser.parse_args([]).threads is None and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("benchmark --contexts 2", "--contexts 2: each must be from 3 to 2048"),
        ("benchmark --out no/where.txt", "--out no/where.txt"),
        ("captions --turns 21", "--turns 21 is more than 20"),
        ("captions --model no/where/at/all", "no/where/at/all"),
        ("finetune sideways", "sideways"),
        ("latency --baselines vllm", "vllm"),
        ("latency --model-size 230M --model folder", "not allowed with"),
        ("latency --model no/where/near", "no/where/near"),
        ("latency --level amx-emulated", "this CPU has no level amx-emulated; use "),
        ("sort_task --steps 0", "0 must be 1 or more"),
        ("sort_task --steps x", "'x'"),
        ("speedup --lengths 8", "--lengths 8"),
        ("speedup --lengths 8 4", "rising"),
        ("speedup --lengths 4 2000", "lm_max_position_embeddings=1024"),
        ("speedup --html nowhere/page.html", "nowhere"),
    ],
)
def test_wrong_use_of_a_command_is_one_line_and_exit_code_2(command, message, capsys):
    name, *flags = command.split()
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"eval.{name}").main(flags)
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"eval.{name}: ") and message in err and err.count("\n") == 1
