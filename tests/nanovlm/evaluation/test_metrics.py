"""Metrics of answers, against reference implementations and figures from their papers."""

import random
from functools import cache

import pytest

from nanovlm.errors import InputError
from nanovlm.evaluation.metrics import METRICS, edit_distance, intervals, load_metric

ANSWERS = ["a cat on a mat", "a dog runs", "Two red birds sit on a wire.", "", "the man's hat is blue blue blue"]
REFERENCES = [
    ["a cat on a mat"],
    ["the dog runs fast", "a dog runs in the park"],
    ["two birds on a wire", "birds sit on a red wire", "there are two birds"],
    ["nothing here"],
    ["the man's hat is blue", "a blue hat"],
]


def test_exact_match_ignores_only_white_space_around_the_text():
    answers = ["red ", "Red", "red.", "blue"]
    assert METRICS["exact_match"](answers, [["red", "blue"]] * 4) == [1, 0, 0, 1]


def test_f1_is_squads():
    """Words count as often as they occur in both; the figures are computed by hand."""
    assert METRICS["f1"](["The cat!", "in the Norman era", "x"], [["a cat"], ["Norman, era"], ["y"]]) == [1.0, 0.8, 0.0]
    assert METRICS["f1"](ANSWERS, REFERENCES) == pytest.approx([1, 4 / 5, 10 / 11, 0, 4 / 5])


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("$3.50", "$350", 0), ("$3.50", "3.50", 1), ("-5", "5", 0), ("+5", "-5", 0), ("1,000", "1000", 1),
        ("7.", "7", 1),        ("5%", "5", 1), ("t-shirt", "tshirt", 1), ("The end.", "end", 1),
    ],
)  # fmt: skip
def test_f1_keeps_the_sign_and_the_point_of_a_number(answer, reference, score):
    assert METRICS["f1"]([answer], [[reference]]) == [score]


def test_the_interval_is_wilsons():
    """Figures of 8 and 10 right of 10, and 160 of 200."""
    assert intervals({"f1": 0.8}, 10)["f1"] == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert intervals({"f1": 1.0, "cider": 1.0, "loss": 0.5}, 10) == {"f1": (pytest.approx(0.7225, abs=1e-4), 1.0)}
    assert intervals({"f1": 0.8}, 200)["f1"] == pytest.approx((0.7391, 0.8495), abs=1e-4)
    assert intervals({"f1": 0.8}, 0) == {}


def test_vqa_accuracy_grows_by_three_tenths_for_each_of_ten_people_who_agree():
    for n, expected in enumerate([0, 0.3, 0.6, 0.9, 1, 1, 1, 1, 1, 1, 1]):
        assert METRICS["vqa_accuracy"](["two"], [["2"] * n + ["three"] * (10 - n)]) == [pytest.approx(expected)]
    answers = ["The Dog.", "1,000", "1.5", "dont", "yes", "none", "5%", "$3", "9:30", "t-shirt", "yes , no"]
    references = ["dog"], ["1000"], ["15"], ["don't"], ["no", "yes"], ["0"], ["5"], ["3"], ["9 30"], ["t shirt"]
    references += (["yes no"],)
    assert METRICS["vqa_accuracy"](answers, references) == [1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1]


def test_anls_is_the_similarity_of_the_best_reference_above_one_half():
    answers = ["helo world", "Hello  World", "abcd", "x", ""]
    references = [["hello world", "y"], ["hello world"], ["abxy"], ["abcdef"], ["a"]]
    assert METRICS["anls"](answers, references) == pytest.approx([1 - 1 / 11, 1, 0, 0, 0])


def test_the_edit_distance_is_that_of_its_recursive_definition():
    @cache
    def distance(a, b):
        if not a or not b:
            return len(a) + len(b)
        changed = distance(a[1:], b[1:]) + (a[0] != b[0])
        return min(changed, distance(a[1:], b) + 1, distance(a, b[1:]) + 1)

    rng = random.Random(0)
    for _ in range(50):
        a, b = ("".join(rng.choices("abc", k=rng.randrange(9))) for _ in range(2))
        assert edit_distance(a, b) == distance(a, b)
    assert edit_distance("kitten", "sitting") == 3


def test_cider_is_that_of_coco_caption():
    """The figures are those of pycocoevalcap 1.2, which is compared, too, where it is installed."""
    ours = METRICS["cider"](["a cat on a mat", "the dog runs fast"], [["a cat on a mat"], ["a dog runs"]])
    assert ours == pytest.approx([10, 2.74992777])
    reference = pytest.importorskip("pycocoevalcap.cider.cider").Cider()
    words = [" ".join(text.lower().replace(".", "").split()) for text in ANSWERS]
    _, expected = reference.compute_score(dict(enumerate(REFERENCES)), {i: [text] for i, text in enumerate(words)})
    assert METRICS["cider"](ANSWERS, REFERENCES) == pytest.approx(list(expected), abs=1e-6)


def test_a_metric_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "nothing")  # which restores the path at the end
    (tmp_path / "my_metrics.py").write_text(
        "def longer(answer, references):\n    return len(answer) > len(references[0])\n\n"
        "def broken(answer, references):\n    return answer[99]\n"
    )
    name, metric = load_metric("my_metrics:longer")
    assert name == "longer" and metric(["ab", "a"], [["a"], ["ab"]]) == [1.0, 0.0]
    with pytest.raises(InputError, match="my_metrics:broken failed for the answer 'ab'.*IndexError"):
        load_metric("my_metrics:broken")[1](["ab"], [["a"]])
    for wrong in ("bleu", "my_metrics:nothing", "no_such_module_x:f"):
        with pytest.raises(InputError, match=wrong):
            load_metric(wrong)
