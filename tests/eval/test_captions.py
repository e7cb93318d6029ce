"""eval.captions: what it counts and what it prints. tests/nanovlm/test_embedded.py pins how good the model is."""

import json

import pytest

from eval import captions
from eval.captions import (
    PRECISIONS,
    accuracy_table,
    compare_precisions,
    comparison_failures,
    comparison_table,
    main,
    measure_turns,
    shared_prefix,
)
from eval.lib.cpu_levels import levels_here
from nanovlm.captioner import Captioner
from nanovlm.processing.processor import Processor


def test_every_answer_that_is_not_right_is_listed(results_of, tmp_path):
    results = results_of(main, "--scenes", "4", "--dtype", "float32", "--save", str(tmp_path))
    splits = [results[name] for name in captions.SPLITS]
    assert [split["of"] for split in splits[:3]] == [4, 4, 12]
    assert len(results["missed"]) == sum(split["of"] - split["right"] for split in splits)
    for split in splits:
        assert sum(row["of"] for row in split["rows"].values()) == split["of"]
        assert sum(row["right"] for row in split["rows"].values()) == split["right"]
    (path,) = tmp_path.iterdir()
    assert accuracy_table(results, 0) in path.read_text() and "torch.float32" in path.read_text()


def test_the_table_shows_shares_intervals_and_misses():
    misses = [("captions", "Describe it.", "A red ring.", "A blue ring.")] * 2
    rows = {"How many": {"right": 100, "of": 100}}
    results = {split: {"right": 98, "of": 100, "rows": rows} for split in captions.SPLITS} | {"missed": misses}
    out = accuracy_table(results, 1)
    assert out.count("missed in captions") == 1 and "truth  A red ring.\n  answer A blue ring." in out
    assert "98.00%  (98 of 100, 95% interval 93.0 to 99.4)" in out and "answers to questions" in out
    assert "100.00%  (100 of 100, 95% interval 96.3 to 100.0)" in out


def test_questions_are_counted_by_turn():
    """Alone, in a conversation, and in one that began with a caption. A first question has no history either way."""
    turns, embedded = [], Captioner.from_pretrained(dtype="float32")

    class Watched(Processor):
        def encode_prompt(self, grids, question, history=(), frame_texts=()):
            turns.append(len(history))
            return super().encode_prompt(grids, question, history, frame_texts)

    captioner = Captioner(embedded.inference, Watched(embedded.processor.cfg, embedded.tokenizer))
    right = measure_turns(captioner, 10, 3, "test")
    assert all(len(counts) == 3 and 0 <= min(counts) <= max(counts) <= 10 for counts in right.values())
    assert min(right["alone"]) >= 8 and right["one after another"][0] == right["alone"][0]
    assert min(right["one after another"]) >= 7 and min(right["after a caption"]) >= 7
    assert turns == 10 * [0, *(0, 0, 0), *(0, 1, 2), *(1, 2, 3)], "a caption, and then three questions three times"


def test_turns_are_printed_as_json_and_kept_as_a_table(results_of, tmp_path):
    results = results_of(main, "--turns", "2", "--scenes", "2", "--save", str(tmp_path))
    assert results["of"] == 2 and [len(counts) for counts in results["right"].values()] == [2, 2, 2]
    assert "after a caption" in next(tmp_path.iterdir()).read_text()


@pytest.mark.full
def test_every_precision_at_every_level_is_compared_with_plain_modules(capsys, tmp_path):
    code = main(["--compare", "--scenes", "4", "--seed", "1", "--json", "--save", str(tmp_path)])
    results = json.loads(capsys.readouterr().out)
    failures, where = results.pop("failures"), results.pop("environment")
    assert failures == comparison_failures(results) and code == bool(failures) and "level" in where
    assert comparison_table(results) in next(tmp_path.iterdir()).read_text()
    levels = levels_here() or ["none"]
    assert next(iter(results)) == "float32 none" and {name.split()[-1] for name in results} == {"none", *levels}
    assert len(results) == len(levels) * len(PRECISIONS) + (levels != ["none"])
    assert results["float32 none"] | {"right": 1} == {"right": 1, "kept": 1, "logits": 0, "prefix": 1, "ratio": 1}
    for level in levels_here():
        assert results[f"float32 {level}"]["logits"] < 1e-4 < results[f"float32 int8 {level}"]["logits"] < 0.1
        assert results[f"float32 {level}"]["prefix"] == results[f"float32 {level}"]["ratio"] == 1
        assert results[f"bfloat16 {level}"]["logits"] < results[f"bfloat16 int4 {level}"]["logits"]


def test_a_shared_prefix_is_a_share_of_the_expected_tokens():
    end = 0
    assert shared_prefix([5, 6, 7, end], [5, 6, 7, end]) == shared_prefix([end], [end]) == 1
    assert shared_prefix([5, 9, 7, end], [5, 6, 7, end]) == 1 / 4
    assert shared_prefix([5, 6, end], [5, 6, 7, end]) == shared_prefix([5, 6, 8, 7, end], [5, 6, 7, end]) == 2 / 4
    assert shared_prefix([6, end], [5, end]) == 0


@pytest.mark.slow
def test_int8_keeps_what_float32_has_right():
    assert comparison_failures(compare_precisions(100, "1")) == []


@pytest.mark.parametrize("kept", [0.98, 0.99])
def test_int8_that_keeps_too_little_is_a_failure(kept):
    row = {"right": 0.9, "kept": kept, "logits": 0.01, "prefix": 0.5, "ratio": 0.8}
    results = {"float32 int8 avx2": row, "float32 none": row}
    assert f"float32 int8 avx2  90.0%  {kept:.1%}   1.00%   50.0%  80.0%" in comparison_table(results)
    message = "float32 int8 avx2 keeps less than 99% of float32's right captions"
    assert comparison_failures(results) == ([message] if kept < 0.99 else [])
