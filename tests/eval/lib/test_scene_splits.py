"""Test examples and their rows."""

import pytest

from eval.lib.scene_splits import N_COMPARED, OBJECT_ROWS, count_by_row, make_splits


@pytest.fixture(scope="module")
def splits():
    return make_splits(40, 3, "test")


def test_every_caption_counts_under_the_number_of_its_objects(splits):
    for split in ("captions", "withheld"):
        assert len(splits[split]) == 40
        for example in splits[split]:
            n = example.truth.count(",") + example.truth.count(" and ") + 1
            assert example.row == OBJECT_ROWS[n - 1]


def test_comparisons_are_about_two_objects_or_more(splits):
    for split, start in (("relations", "Is the "), ("neighbors", "What is ")):
        examples = splits[split]
        assert {example.row for example in examples} == set(OBJECT_ROWS[1:])
        assert all(example.prompt.startswith(start) for example in examples)
        assert all(
            any(f" {relation} the " in e.prompt for relation in ("left of", "right of", "above", "below"))
            for e in examples
        )
        images = [example.image for example in examples]
        assert max(images.count(image) for image in images) == N_COMPARED
    answers = [example.truth for example in splits["relations"]]
    assert set(answers) == {"yes", "no"} and 0.3 < answers.count("yes") / len(answers) < 0.7


def test_questions_of_all_kinds_are_asked_about_the_scenes_of_the_captions(splits):
    assert len(splits["questions"]) == 120
    assert {example.image for example in splits["questions"]} == {example.image for example in splits["captions"]}
    assert {example.row for example in splits["questions"]} == {
        "Is X left of Y?", "What is left of X?", "What is at the top?", "What is the background?", "What colour",
        "What shape", "How big", "How many", "Is there", "Where is",
    }  # fmt: skip


def test_rows_are_in_order():
    rows = ["four objects", "one object", "four objects", "two objects"]
    counts = count_by_row(rows, [True, True, False, False])
    assert list(counts) == ["one object", "two objects", "four objects"]
    assert counts["four objects"] == {"right": 1, "of": 2}
    assert list(count_by_row(["Is there", "How many", "How many"], [True] * 3)) == ["How many", "Is there"]
