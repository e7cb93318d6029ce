"""eval.captions: what it asks, counts and prints. tests/nanovlm/test_embedded.py pins how good the model is."""

import json

import pytest

from eval import captions
from eval.captions import COMPARED, N_COMPARED, OBJECT_ROWS, SPLITS, count_by_row, main, make_splits
from eval.lib.command import levels_here

KINDS = {
    "Is X left of Y?", "What is left of X?", "What is at the top?", "What is the background?", "What colour",
    "What shape", "How big", "How many", "Is there", "Where is",
}  # fmt: skip


def test_examples_are_about_the_scenes_and_count_in_the_rows_that_they_name():
    splits = make_splits(40, 3, "test")
    for split in ("captions", "withheld"):
        assert len(splits[split]) == 40
        for example in splits[split]:
            n_objects = example.truth.count(",") + example.truth.count(" and ") + 1
            assert example.row == OBJECT_ROWS[n_objects - 1]
    assert len(splits["questions"]) == 120 and {example.row for example in splits["questions"]} == KINDS
    assert {example.image for example in splits["questions"]} == {example.image for example in splits["captions"]}
    for split, start in (("relations", "Is the "), ("neighbors", "What is ")):
        images = [example.image for example in splits[split]]
        assert max(images.count(image) for image in images) == N_COMPARED
        assert {example.row for example in splits[split]} == set(OBJECT_ROWS[1:]), "of two objects or more"
        for example in splits[split]:
            assert example.prompt.startswith(start)
            assert any(f" {word} the " in example.prompt for word in ("left of", "right of", "above", "below"))
    answers = [example.truth for example in splits["relations"]]
    assert set(answers) == {"yes", "no"} and 0.3 < answers.count("yes") / len(answers) < 0.7
    counts = count_by_row(["four objects", "one object", "four objects", "two objects"], [True, True, False, False])
    assert list(counts) == ["one object", "two objects", "four objects"]
    assert counts["four objects"] == {"right": 1, "of": 2}
    assert list(count_by_row(["Is there", "How many", "How many"], [True] * 3)) == ["How many", "Is there"]


def test_every_answer_that_is_not_right_is_listed(results_of, tmp_path):
    results = results_of(main, "--scenes", "4", "--dtype", "float32", "--save", str(tmp_path))
    found = [results[name] for name in SPLITS]
    assert [split["of"] for split in found[:3]] == [4, 4, 12]
    assert len(results["missed"]) == sum(split["of"] - split["right"] for split in found)
    for split in found:
        for key in ("of", "right"):
            assert sum(row[key] for row in split["rows"].values()) == split[key]
    (path,) = tmp_path.iterdir()
    assert captions.accuracy_table(results, 0) in path.read_text() and "torch.float32" in path.read_text()


@pytest.mark.full
def test_every_precision_at_every_level_is_compared_with_plain_modules(capsys, tmp_path):
    code = main(["--compare", "--scenes", "4", "--seed", "1", "--json", "--save", str(tmp_path)])
    results = json.loads(capsys.readouterr().out)
    failures, where = results.pop("failures"), results.pop("environment")
    assert failures == captions.comparison_failures(results) and code == bool(failures) and "level" in where
    assert captions.comparison_table(results) in next(tmp_path.iterdir()).read_text()
    levels = levels_here() or ["none"]
    assert next(iter(results)) == "float32 none" and {name.split()[-1] for name in results} == {"none", *levels}
    assert len(results) == len(levels) * len(COMPARED) + (levels != ["none"])
    assert results["float32 none"] | {"right": 1} == {"right": 1, "kept": 1, "logits": 0, "prefix": 1, "ratio": 1}
    for level in levels_here():
        assert results[f"float32 {level}"]["logits"] < 1e-4 < results[f"float32 int8 {level}"]["logits"] < 0.1
        assert results[f"float32 {level}"]["prefix"] == results[f"float32 {level}"]["ratio"] == 1
        assert results[f"bfloat16 {level}"]["logits"] < results[f"bfloat16 int4 {level}"]["logits"]


@pytest.mark.parametrize(
    ("ids", "share"), [([5, 6, 7, 0], 1), ([5, 9, 7, 0], 1 / 4), ([5, 6, 0], 2 / 4), ([5, 6, 8, 7, 0], 2 / 4), ([0], 0)]
)
def test_a_shared_prefix_is_a_share_of_the_expected_tokens(ids, share):
    assert captions.shared_prefix(ids, [5, 6, 7, 0]) == share


@pytest.mark.slow
def test_int8_keeps_what_float32_has_right():
    assert captions.comparison_failures(captions.compare_precisions(100, "1")) == []


@pytest.mark.parametrize("kept", [0.98, 0.99])
def test_int8_that_keeps_too_little_is_a_failure(kept):
    row = {"right": 0.9, "kept": kept, "logits": 0.01, "prefix": 0.5, "ratio": 0.8}
    results = {"float32 int8 avx2": row, "float32 none": row}
    assert f"float32 int8 avx2  90.0%  {kept:.1%}   1.00%   50.0%  80.0%" in captions.comparison_table(results)
    message = "float32 int8 avx2 keeps less than 99% of float32's right captions"
    assert captions.comparison_failures(results) == ([message] if kept < 0.99 else [])
