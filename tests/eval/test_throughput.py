"""eval.throughput with small models: both sides of each comparison do the same work."""

import json

import pytest
import torch

from eval import throughput
from eval.lib.shapes import SHAPES
from eval.throughput import (
    IMAGE_TOKEN,
    TrainingResult,
    captioning_table,
    main,
    make_step,
    measure_captioning,
    packing_batches,
    precision_batches,
    run_training,
)
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm.captioner import Captioner
from support import TINY
from support.checkpoints import small

CFG = VLMConfig(**TINY | {"lm_max_position_embeddings": 512})
CPU = torch.device("cpu")


def tiny_training_model():
    torch.manual_seed(0)
    return VisionLanguageModel(CFG, IMAGE_TOKEN).train()


def test_single_calls_and_the_folder_give_the_same_captions():
    result = measure_captioning(Captioner.from_pretrained(dtype="float32"), 5, "1", rounds=2)
    assert result["images"] == 5 and result["failed"] == [] and 0 < result["model_busy"] <= 1
    assert result["same_captions"] == 5
    assert result["folder_per_minute"] > 0 < result["one_by_one_per_minute"] and "of 5" in captioning_table(result)


def test_a_published_shape_is_captioned_with_random_weights(monkeypatch, capsys):
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


@pytest.mark.parametrize(
    "make", [lambda: precision_batches(CFG, 24), lambda: packing_batches(CFG, 4, 60)], ids=["precision", "packing"]
)
def test_both_sides_learn_the_same_from_the_same_examples(make):
    torch.manual_seed(1)
    baseline, faster = make()
    answers, losses = [], []
    for side in (baseline, faster):
        assert side.tokens == int((side.batch["attention_mask"] != 0).sum())
        answers.append(int((side.batch["targets"] >= 0).sum()))
        with torch.autocast("cpu", side.dtype, enabled=side.dtype != torch.float32):
            losses.append(tiny_training_model()(**side.batch)[1].item())
    assert answers[0] == answers[1] and baseline.tokens == faster.tokens
    assert losses[1] == pytest.approx(losses[0], rel=2e-2), "bfloat16 rounds"
    assert faster.batch["input_ids"].numel() <= baseline.batch["input_ids"].numel()


def test_a_step_learns():
    model, (_, packed) = tiny_training_model(), packing_batches(CFG, 4, 60)
    before, step = model(**packed.batch)[1].item(), make_step(model)
    assert all(step(packed) > 0 for _ in range(20))
    assert model(**packed.batch)[1].item() < before


def test_training_speed_is_tokens_of_examples_per_second(capsys):
    results = run_training(CFG, CPU, 1, {"bfloat16": 0.0, "packed": 1e9})
    assert [list(result.tokens_per_s) for result in results] == [["float32", "bfloat16"], ["padded", "packed"]]
    for result in results:
        slow, fast = result.tokens_per_s.values()
        assert result.speedup == pytest.approx(fast / slow)
    assert results[0].failures == [] and "less than 1e+09 times" in results[1].failures[0]


@pytest.mark.parametrize("speedup", [1.4, 1.6])
def test_training_prints_both_comparisons_and_fails_below_the_minimum(monkeypatch, capsys, speedup):
    results = [
        TrainingResult({"float32": 1.0, "bfloat16": 3.0}, 3.0, 2.0),
        TrainingResult({"padded": 1.0, "packed": speedup}, speedup, 1.5),
    ]
    monkeypatch.setattr(throughput, "run_training", lambda *args: results)
    assert main(["--train", "--device", "cpu"]) == (speedup < 1.5)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("222M: float32 ") and " packed " in lines[1] and "medians of 3 rounds" in lines[2]
    assert ("packed is 1.40 times as fast as padded, less than 1.5 times" in err) == (speedup < 1.5)


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--model-size", "7B"], ["--device", "a"], ["--images", "0"]])
def test_wrong_flags_are_one_line_and_exit_code_2(capsys, flags):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert capsys.readouterr().err.count("\n") == 1
