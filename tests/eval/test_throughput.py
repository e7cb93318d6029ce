"""eval.throughput: single calls and a folder give the same captions."""

import json

import pytest

from eval import throughput
from eval.lib.shapes import SHAPES
from eval.throughput import captioning_table, main, measure_captioning
from nanovlm.captioner import Captioner
from support.checkpoints import small


def test_single_calls_and_the_folder_give_the_same_captions():
    result = measure_captioning(Captioner.from_pretrained(dtype="float32"), 5, "1", rounds=2)
    assert result["images"] == 5 and result["failed"] == [] and 0 < result["model_busy"] <= 1
    assert result["same_captions"] == 5
    assert result["folder_per_minute"] > 0 < result["one_by_one_per_minute"] and "of 5" in captioning_table(result)


def test_a_published_size_is_captioned_with_random_weights(monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "230M", (small(SHAPES["230M"][0], 1000), 0))
    assert main(["--model-size", "230M", "--images", "2", "--rounds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["images"] == 2 and 0 < result["model_busy"] <= 1


def test_an_image_without_a_caption_is_a_failure(monkeypatch, capsys):
    result = {"images": 2, "one_by_one_per_minute": 1, "folder_per_minute": 1, "speedup": 1.0, "model_busy": 0.5}
    result |= {"same_captions": 1, "failed": ["a.png: not enough memory"]}
    monkeypatch.setattr(throughput, "measure_captioning", lambda *args: result)
    assert main(["--images", "2"]) == 1
    assert capsys.readouterr().err == "no caption for a.png: not enough memory\n"


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--model-size", "7B"], ["--device", "a"], ["--images", "0"]])
def test_wrong_flags_are_one_line_and_exit_code_2(capsys, flags):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert capsys.readouterr().err.count("\n") == 1
