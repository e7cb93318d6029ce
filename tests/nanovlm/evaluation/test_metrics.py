"""Metrics of answers, against reference implementations and figures from their papers."""

import math
import random
from functools import cache
from itertools import combinations

import pytest

from nanovlm.data.examples import Question
from nanovlm.errors import InputError
from nanovlm.evaluation.evaluate import Answer, Evaluation
from nanovlm.evaluation.metrics import METRICS, edit_distance, intervals, load_metric

ANSWERS = ["a cat on a mat", "a dog runs", "Two red birds sit on a wire.", "", "the man's hat is blue blue blue"]
REFERENCES = [
    ["a cat on a mat"],
    ["the dog runs fast", "a dog runs in the park"],
    ["two birds on a wire", "birds sit on a red wire", "there are two birds"],
    ["nothing here"],
    ["the man's hat is blue", "a blue hat"],
]


OTHER_NUMBERS = [  # pairs that are 1 without their signs and points
    ("2.5cm", "25cm"), ("-5°C", "5°C"), ("$1.50/kg", "$150/kg"), ("12/5", "125"), ("3-4", "34"), ("v2.5", "v25"),
    (".5", "5"), ("−5", "5"), ("–5 °C", "5 °C"), ("-$5", "$5"), ("-.5", ".5"), ("1,5", "15"), ("1.000", "1000"),
    ("2020-01-05", "20200105"), ("1/2/2020", "122020"), ("(-5)", "(5)"), ("+5", "-5"), ("5+", "5"), ("A-5", "-5"),
    ("5'10", "510"), ("2.5-3.5cm", "25-35cm"), ("it is -5.", "it is 5."), ("10.5%", "105%"), ("1e-5", "1e5"),
    ("<5", ">5"), ("1_0", "10"), ("5%-10%", "5%10%"), ("-5,000", "5000"), ("-½", "½"), ("3·5", "35"),
]  # fmt: skip
SAME_NUMBERS = [
    ("1,000", "1000"), ("$1,000.50", "$1000.50"), ("1,000,000 km", "1000000 km"), ("5.", "5"),
    ("It is 2.5.", "it is 2.5"),
    ("−5°C", "-5°C"), ("3–4", "3-4"), ("5, 6", "5 6"), ("May 5, 2020", "may 5 2020"), ("(5)", "5"), ("5!", "5"),
    ("v2.5,", "v2.5"), ("the 1/2", "1/2"),
]  # fmt: skip
NEVER_EMPTY = ["the", "a", "an", "!", "?!", ".", "-", "/", ""]


@pytest.mark.parametrize("metric", ["f1", "vqa_accuracy"])
@pytest.mark.parametrize(("one", "other"), [*OTHER_NUMBERS, *SAME_NUMBERS, *combinations(NEVER_EMPTY, 2)])
def test_signs_and_points_stand_beside_digits_and_no_text_becomes_empty(metric, one, other):
    score = METRICS[metric]
    is_same = (one, other) in SAME_NUMBERS
    alike = score([one, other], [[other], [one]])
    assert alike == [1, 1] if is_same else max(alike) < 1
    assert score([one, other], [[one], [other]]) == [1, 1]


SCORES = [  # metric, answer, references, score
    *(("exact_match", text, ["red", "blue"], n) for text, n in [("red ", 1), ("Red", 0), ("red.", 0), ("blue", 1)]),
    ("f1", "The cat!", ["a cat"], 1),
    ("f1", "in the Norman era", ["Norman, era"], 0.8),
    *(("f1", text, truths, n) for text, truths, n in zip(ANSWERS, REFERENCES, [1, 4 / 5, 10 / 11, 0, 4 / 5])),
    ("f1", "$3.50", ["3.50"], 1), ("f1", "5%", ["5"], 1), ("f1", "t-shirt", ["tshirt"], 1),
    # each of ten people who agree is worth three tenths
    *(("vqa_accuracy", "two", ["2"] * n + ["three"] * (10 - n), min(1, 0.3 * n)) for n in range(11)),
    ("vqa_accuracy", "The Dog.", ["dog"], 1), ("vqa_accuracy", "dont", ["don't"], 1),
    ("vqa_accuracy", "yes", ["no", "yes"], 1), ("vqa_accuracy", "none", ["0"], 1), ("vqa_accuracy", "5%", ["5"], 0),
    ("vqa_accuracy", "$3", ["3"], 0), ("vqa_accuracy", "9:30", ["9 30"], 0),
    ("vqa_accuracy", "t-shirt", ["t shirt"], 1), ("vqa_accuracy", "yes , no", ["yes no"], 1),
    ("anls", "helo world", ["hello world", "y"], 1 - 1 / 11), ("anls", "Hello  World", ["hello world"], 1),
    ("anls", "abcd", ["abxy"], 0), ("anls", "x", ["abcdef"], 0), ("anls", "", ["a"], 0), ("anls", "", [""], 1),
    *((metric, text, [truth], score) for metric in ("f1", "vqa_accuracy")
      for text, truth, score in (("A.", "a", 1), ("the", "A", 0), ("A", "B", 0))),  # a choice is no article
]  # fmt: skip


@pytest.mark.parametrize(("metric", "answer", "references", "score"), SCORES)
def test_the_score_of_an_answer(metric, answer, references, score):
    """The figures are computed by hand, and those of the official scripts."""
    assert METRICS[metric]([answer], [references]) == [pytest.approx(score)]


def test_the_interval_is_wilsons():
    """Figures of 8 and 10 right of 10, and 160 of 200."""
    assert intervals({"f1": 0.8}, 10)["f1"] == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert intervals({"f1": 1.0, "cider": 1.0, "loss": 0.5}, 10) == {"f1": (pytest.approx(0.7225, abs=1e-4), 1.0)}
    assert intervals({"f1": 0.8}, 200)["f1"] == pytest.approx((0.7391, 0.8495), abs=1e-4)
    assert intervals({"f1": 0.8}, 0) == {}


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


def test_cider_is_that_of_coco_caption():
    """The figures are those of pycocoevalcap 1.2, which is compared, too, where it is installed."""
    ours = METRICS["cider"](["a cat on a mat", "the dog runs fast"], [["a cat on a mat"], ["a dog runs"]])
    assert ours == pytest.approx([10, 2.74992777])
    reference = pytest.importorskip("pycocoevalcap.cider.cider").Cider()
    words = [" ".join(text.lower().replace(".", "").split()) for text in ANSWERS]
    _, expected = reference.compute_score(dict(enumerate(REFERENCES)), {i: [text] for i, text in enumerate(words)})
    assert METRICS["cider"](ANSWERS, REFERENCES) == pytest.approx(list(expected), abs=1e-6)


SAME = [("A-", ["A-"]), ("A red car.", ["red car"]), ("1,000", ["1000"]), ("A+", ["A-", "A+"]), ("Yes!", ["yes"])]
OTHER = [("A-", ["A+"]), ("O+", ["O-"]), ("a+b", ["a-b"]), ("C#", ["C++", "D#"]), ("grade A-", ["Grade A"])]


@pytest.mark.parametrize(("answer", "references"), [*SAME, *OTHER])
def test_texts_that_differ_in_signs_alone_choose_no_model(answer, references):
    assert METRICS["f1"]([answer], [references]) == [1], "the printed score is the field's"
    answered = Answer(Question("d", "a", [], [], references), answer, {"f1": 1.0, "anls": 0.5})
    chosen = Evaluation([answered, answered])
    assert chosen.to_choose_by("f1") == ((answer, references) in SAME) and chosen.to_choose_by("anls") == 0.5
    assert math.isnan(Evaluation([]).to_choose_by("f1"))


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
    assert load_metric("-my_metrics:longer")[0] == "longer"
    for wrong in ("bleu", "my_metrics:nothing", "no_such_module_x:f"):
        with pytest.raises(InputError, match=wrong):
            load_metric(wrong)
