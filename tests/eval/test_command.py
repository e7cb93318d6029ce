"""Shared by the evaluation commands: help, wrong use, the report, levels, timing in turns."""

import importlib
import json
import os

import pytest
import torch

from eval.lib import command
from eval.lib.command import at_level, current_level, interleave, levels_here
from support import ROOT

COMMANDS = sorted(path.stem for path in (ROOT / "eval").glob("*.py") if "sys.exit(main())" in path.read_text("utf-8"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_help_and_takes_a_number_of_threads(name, capsys):
    main = importlib.import_module(f"eval.{name}").main
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: eval.{name} ") and f"python -m eval.{name}" in out
    with pytest.raises(SystemExit, match="2"):
        main(["--threads", "0"])
    assert "0 must be 1 or more" in capsys.readouterr().err


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("benchmark --contexts 2", "--contexts 2: each must be from 3 to 2048"),
        ("benchmark --out no/where.txt", "--out no/where.txt"),
        ("captions --model no/where/at/all", "no/where/at/all"),
        ("captions --level amx-emulated", "this CPU has no level amx-emulated; use "),
        ("captions --digits --scenes 9", "not allowed with"),
        ("captions --photos docs", "--out"),
        ("captions --photos docs --out no", "docs/train has no folders of images"),
        ("captions --scenes 9 --then x", "--then"),
        ("captions --text no/where.txt", "no/where.txt"),
        ("captions --text LICENSE --model nanovlm/assets --step 9999", "leaves nothing to predict from"),
        ("latency --baselines vllm", "vllm"),
        ("latency --model-size 230M --model folder", "not allowed with"),
        ("latency --model no/where/near", "no/where/near"),
        pytest.param("latency --device cuda", "device=cuda is not available", marks=without_gpu),
        ("latency --level amx-emulated", "this CPU has no level amx-emulated; use "),
        ("sort_task --steps 0", "0 must be 1 or more"),
        ("sort_task --steps x", "'x'"),
        ("speedup --lengths 8", "--lengths 8"),
        ("speedup --lengths 8 4", "rising"),
        ("speedup --lengths 4 2000", "lm_max_position_embeddings=1024"),
    ],
)
def test_wrong_use_of_a_command_is_one_line_and_exit_code_2(line, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, *flags = line.split()
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"eval.{name}").main(flags)
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"eval.{name}: ") and message in err and err.count("\n") == 1


def test_results_are_text_or_one_object_and_saved_below_their_command(capsys, tmp_path):
    for text in ("half of it", "more"):
        assert command.report({"share": 0.5}, text, "a machine", (), False, tmp_path / "new") == 0
    (path,) = (tmp_path / "new").iterdir()
    out, err = capsys.readouterr()
    assert out == "half of it\na machine\nmore\na machine\n" and err == f"appended to {path}\n" * 2
    assert path.stem == command.file_name([command.cpu_name(), command.cpu_info("cpu family"), *levels_here()[-1:]])
    assert command.file_name(["Intel(R) Xeon(R) 8488C", "avx2-vnni"]) == "intel-xeon-8488c-avx2-vnni"
    lines = path.read_text().splitlines()
    assert lines[1:3] == ["half of it", "a machine"] and lines[5:] == ["more", "a machine", ""]
    assert lines[0] == lines[4] and lines[0].startswith("$ python ")
    assert command.report({"share": 0.5}, "half", "a machine", ["too few"], as_json=True) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"share": 0.5, "failures": ["too few"], "environment": "a machine"} and err == "too few\n"


def test_threads_are_those_of_this_process_and_of_later_ones(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command.add_threads_flag(parser := command.make_parser("name", "what it is"))
    before = torch.get_num_threads()
    try:
        assert parser.parse_args(["--threads", "2"]).threads == torch.get_num_threads() == 2
        assert os.environ["OMP_NUM_THREADS"] == "2"
        torch.set_num_threads(1)
        assert parser.parse_args([]).threads is None and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_level_is_that_of_the_block_and_then_the_one_before(monkeypatch):
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", "none")
    for level in levels_here():
        with at_level(level):
            assert current_level() == level
    assert current_level() == "none"
    monkeypatch.delenv("NANOVLM_CPU_LEVEL")
    assert current_level() == (levels_here() or ["none"])[-1]


def test_the_machine_is_one_line_with_plausible_limits():
    line = command.environment("cpu", torch.bfloat16)
    assert f"torch {torch.__version__}" in line and f"{torch.get_num_threads()} threads" in line
    assert f"level {current_level()}" in line and "level avx2 vnni" in command.environment(levels=["avx2", "vnni"])
    assert "torch.bfloat16" in line and "\n" not in line and not line.startswith(",")
    assert 1e8 < command.memory_bandwidth(2**24) < 1e13
    assert all(1e7 < command.matmul_flops(dtype, 256) < 1e15 for dtype in (torch.float32, torch.int8))


def test_contestants_take_turns_after_warming_up():
    calls = []

    def contestant(name, seconds):
        return lambda: calls.append(name) or seconds.pop()

    contestants = {"a": contestant("a", [6.0, 9.0, 1.0, 50.0]), "b": contestant("b", [2.0, 1.0, 3.0, 50.0])}
    assert interleave(contestants, rounds=3, warmup=1) == {"a": [1.0, 9.0, 6.0], "b": [3.0, 1.0, 2.0]}
    assert calls == ["a", "b"] * 4
    assert command.measure_seconds(calls.clear) > 0 and calls == []
