"""eval.speedup: its report, its plot, and which results fail."""

import json
from dataclasses import replace

import pytest
import torch

from eval.lib.cache_timing import Curve, StudyResult
from eval.speedup import failures, main

QUICK = ["--lengths", "3", "6", "--rounds", "1", "--device", "cpu", "--no-export", "--no-sort-task"]
QUICK += ["--no-table", "--no-attribute"]


def test_the_report_is_printed_and_plotted(tmp_path, capsys):
    assert main([*QUICK, "--plot", str(tmp_path / "plot.png")]) == 0
    out, err = capsys.readouterr()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "6 of 6" in out and "1.38x" in out and "torch" in out and "hooks" in out and "round 1/1" in err


def test_the_report_is_one_json_object(capsys):
    assert main([*QUICK, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [len(study["curves"]) for study in results["studies"]] == [3, 5]
    assert all(curve["same_ids"] == 6 for study in results["studies"] for curve in study["curves"])
    assert results["published_speedup"] == 1.38 and "torch" in results["environment"]


def test_a_plot_without_a_file_is_drawn_in_the_terminal(capsys):
    assert main([*QUICK, "--plot"]) == 0
    out = capsys.readouterr().out
    assert out.count("ms from pixels to the last token") == 2 and out.count(" new tokens\n") == 2 and "\x1b" not in out


def test_a_cache_that_changes_the_tokens_is_a_failure_in_float32():
    curve = Curve("hooks", [1.0, 2.0], [0.0, 0.0], 1.0, 1.0, [1, 2], 1.0, same_ids=3)
    result = StudyResult("model", 1, 1, 1.0, 1.0, [4, 8], [curve])
    assert failures([result], None, torch.float32) == ["model: hooks differs from no cache after 3 tokens"]
    assert failures([result], None, torch.bfloat16) == [], "rounding may choose another of two nearly equal"
    assert failures([replace(result, curves=[replace(curve, same_ids=8)])], None, torch.float32) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "8"], "--lengths 8"),
        (["--lengths", "8", "4"], "rising"),
        (["--lengths", "4", "2000"], "lm_max_position_embeddings=1024"),
        (["--rounds", "0"], "--rounds: 0 must be 1 or more"),
        (["--shape", "7B"], "7B"),
        (["--plot", "nowhere/plot.png"], "no folder nowhere"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_without_its_package_a_plot_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for flags, extra in ((["--plot", "plot.png"], "nanovlm[eval]"), (["--plot"], "nanovlm[plot]")):
        with pytest.raises(SystemExit, match="2"):
            main(flags)
        assert extra in capsys.readouterr().err
