"""The benchmark of reading pictures, opened with small models: what it compares, and that both sides do the same."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import eval.pictures as door
from eval.pictures import COLD, QUESTIONS, SHAPES, main, timed, turns
from models.inference.fused_vision import FusedVisionTransformer
from support.checkpoints import small


@pytest.fixture
def quick(monkeypatch):
    """A small model takes the published one's place, and no process is started cold."""
    cfg = replace(small(SHAPES["230M"][0], 1000), vit_patch_size=64, mp_pixel_shuffle_factor=8, mp_image_token_length=1)
    monkeypatch.setattr(door, "SHAPES", {"230M": (cfg, 0)})
    monkeypatch.setattr(door, "NAMES", ("230M",))
    monkeypatch.setattr(door, "COLD", {name: [sys.executable, "-c", ""] for name in COLD})
    monkeypatch.setattr(door, "progress", lambda line: None)


def test_every_stage_is_compared(quick, capsys, monkeypatch):
    kinds, first_token = set(), door.first_token

    def looked(captioner, picture):
        kinds.add((captioner.model.dtype, type(captioner.model.vision_encoder) is FusedVisionTransformer))
        return first_token(captioner, picture)

    monkeypatch.setattr(door, "first_token", looked)
    assert main(["--rounds", "1", "--json", "--sides", "512", "1024"]) == 0
    found = json.loads(capsys.readouterr().out)["comparisons"]
    stages = ["encode", "prefill", "first token"]
    assert [one["stage"] for one in found] == [*stages, *stages, "eight questions", "eight questions", "cold start"]
    assert all(one["times"] == one["before_s"] / one["here_s"] > 0 for one in found)
    assert (torch.float32, False) in kinds and len(kinds) == 2
    for first in (0, 3):
        encode, prefill, whole = (one["here_s"] for one in found[first : first + 3])
        assert 0 < encode + prefill < whole
    assert len(set(QUESTIONS)) == 8


def test_the_table_names_both_sides(quick, capsys):
    assert main(["230M", "--rounds", "1", "--sides", "512"]) == 0
    out = capsys.readouterr().out
    assert "230M, 512 px" in out and "generate.py" in out and "medians of 1 rounds" in out and out.count("x\n") == 6


def test_sides_take_turns_and_medians_are_kept():
    calls = []

    def way(name, figures):
        return lambda: calls.append(name) or {"stage": figures.pop()}

    (one,) = turns("what", way("before", [6.0, 9.0, 1.0]), way("here", [2.0, 1.0, 3.0]), 3)
    assert calls == ["before", "here"] * 3 and (one.before_s, one.here_s, one.times) == (6.0, 2.0, 3.0)


def test_calls_of_a_module_are_timed_while_it_is_asked_for():
    module = nn.Linear(2, 2)
    with timed(module) as seconds:
        module(torch.ones(2))
        module(torch.ones(2))
    module(torch.ones(2))
    assert len(seconds) == 2 and min(seconds) > 0


@pytest.mark.parametrize("flags", [["7B"], ["--rounds", "0"], ["--sides", "0"]])
def test_wrong_flags_are_one_line_and_exit_code_2(capsys, flags):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert capsys.readouterr().err.count("\n") == 1
