"""The speed of training steps, opened with small models: what is compared is the same work."""

import json

import pytest
import torch

import eval.train_speed as door
from eval.train_speed import IMAGE_TOKEN, main, mixed, precisions, stepper
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from support import TINY

CFG = VLMConfig(**TINY)


def tiny():
    torch.manual_seed(0)
    return VisionLanguageModel(CFG, IMAGE_TOKEN).train()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(door, "SHAPES", {"222M": (CFG, 0)})
    monkeypatch.setattr(door, "precisions", lambda cfg, length: precisions(cfg, 24))
    monkeypatch.setattr(door, "mixed", lambda cfg, shortest, longest: mixed(cfg, 4, 60))
    monkeypatch.setattr(door, "progress", lambda line: None)


@pytest.mark.parametrize("ways", [lambda: precisions(CFG, 24), lambda: mixed(CFG, 4, 60)], ids=["precision", "packing"])
def test_both_ways_learn_the_same_from_the_same_examples(ways):
    """In float32 to its precision, in bfloat16 to that."""
    torch.manual_seed(1)
    slow, fast = ways()
    answers, losses = [], []
    for way in (slow, fast):
        assert way.tokens == int((way.batch["attention_mask"] != 0).sum())
        answers.append(int((way.batch["targets"] >= 0).sum()))
        with torch.autocast("cpu", way.dtype, enabled=way.dtype != torch.float32):
            losses.append(tiny()(**way.batch)[1].item())
    assert answers[0] == answers[1] and slow.tokens == fast.tokens
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert fast.batch["input_ids"].numel() <= slow.batch["input_ids"].numel()


def test_a_step_learns(small):
    model, (_, way) = tiny(), mixed(CFG, 4, 60)
    before, step = model(**way.batch)[1].item(), stepper(model)
    assert all(step(way) > 0 for _ in range(20))
    assert model(**way.batch)[1].item() < before


@pytest.mark.parametrize("bar", [0.0, 1e9])
def test_the_door_tells_both_comparisons_and_which_bar_is_missed(small, capsys, monkeypatch, bar):
    monkeypatch.setattr(door, "BARS", {"bfloat16": 0.0, "packed": bar})
    assert main(["--rounds", "1", "--device", "cpu", "--json"]) == (1 if bar else 0)
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert [list(result["tokens_per_s"]) for result in told["results"]] == [
        ["float32", "bfloat16"],
        ["padded", "packed"],
    ]
    for result in told["results"]:
        slow, fast = result["tokens_per_s"].values()
        assert result["gain"] == pytest.approx(fast / slow)
    assert err.splitlines() == told["failures"] and len(told["failures"]) == bool(bar)
    assert not bar or "less than 1e+09 times" in err


def test_the_door_prints_a_line_for_each(small, capsys, monkeypatch):
    monkeypatch.setattr(door, "BARS", {"bfloat16": 0.0, "packed": 0.0})
    assert main(["--rounds", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("222M: float32 ") and " packed " in out[1] and "medians of 1 rounds" in out[2]


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--shape", "7B"], ["--device", "abacus"]])
def test_wrong_flags_are_one_line_and_exit_code_2(capsys, flags):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert capsys.readouterr().err.count("\n") == 1
