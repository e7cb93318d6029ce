"""eval.captions: what it asks, counts and compares. tests/nanovlm/test_embedded.py pins how good the model is."""

import json
import re
from functools import partial

import pytest
import torch

from eval import captions
from eval.captions import main, measure, predict_text, share_line
from eval.lib import classification
from eval.lib.command import levels_here
from eval.lib.precisions import COMPARED, Predictions, compare, comparison_table
from eval.lib.scenes import N_QUESTIONS, OBJECT_ROWS, SPLITS, Example, make_splits
from eval.peers import Engine
from nanovlm import EMBEDDED

KINDS = {
    "Is X left of Y?", "What is left of X?", "What is at the top?", "What is the background?", "What colour",
    "What shape", "How big", "How many", "Is there", "Where is",
}  # fmt: skip


def test_examples_are_about_the_scenes_and_count_in_the_rows_that_they_name():
    splits = make_splits(40, seed="eval test")
    for example in [*splits["captions"], *splits["withheld"]]:
        n_objects = example.truth.count(",") + example.truth.count(" and ") + 1
        assert example.row == OBJECT_ROWS[n_objects - 1]
    questions = splits["questions"]
    assert [len(splits[name]) for name in ("captions", "withheld", "questions")] == [40, 40, 120]
    assert {example.row for example in questions} == KINDS
    assert {example.image for example in questions} == {example.image for example in splits["captions"]}
    for split, start in (("relations", "Is the "), ("neighbors", "What is ")):
        images = [example.image for example in splits[split]]
        assert max(images.count(image) for image in images) == N_QUESTIONS
        assert {example.row for example in splits[split]} == set(OBJECT_ROWS[1:]), "of two objects or more"
        for example in splits[split]:
            assert re.match(rf"{start}(.* )?(left of|right of|above|below) the ", example.prompt)
    answers = [example.truth for example in splits["relations"]]
    assert set(answers) == {"yes", "no"} and 0.3 < answers.count("yes") / len(answers) < 0.7


class Parrot:
    """Answers every question with its image."""

    prompt = "What?"

    def captions(self, images, prompts, batch_size):
        assert set(prompts) <= {"What?", "Why?"}
        return images


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["four objects", "one object", "four objects", "two objects"], ["one object", "two objects", "four objects"]),
        (["Is there", "How many", "Where", "How many"], ["How many", "Is there", "Where"]),
    ],
)
def test_right_answers_are_counted_by_row_and_others_listed(rows, expected):
    examples = [Example(*one) for one in zip("abcd", ["Why?", None, "Why?", None], ["a", "b", "no", "d"], rows)]
    results = measure(Parrot(), {"mine": examples})
    assert results["missed"] == [("mine", "Why?", "no", "c")]
    counted = {row: (rows.count(row) - (row == rows[2]), rows.count(row)) for row in expected}
    assert [*results["mine"]["rows"]] == expected
    for row, (right, of) in counted.items():
        assert results["mine"]["rows"][row].items() >= {"right": right, "of": of, "exact": right / of}.items()
    assert share_line("mine", results["mine"]).split()[:5] == ["mine", "75.00%", "(3", "of", "4,"]


def test_every_split_is_reported_and_saved(results_of, tmp_path):
    results = results_of(main, "--scenes 4 --dtype float32 --save", str(tmp_path))
    assert [results[name]["of"] for name in SPLITS][:3] == [4, 4, 12]
    assert len(results["missed"]) == sum(results[name]["of"] - results[name]["right"] for name in SPLITS)
    text = next(tmp_path.iterdir()).read_text()
    assert "torch.float32" in text and all(share_line(SPLITS[name], results[name]) in text for name in SPLITS)


def test_figures_are_relative_to_the_first_and_those_of_tokens_have_a_perplexity():
    logits = torch.tensor([[9.0, 1, 0], [2.0, 1, 0], [0.0, 0, 1]])
    found = {"plain": Predictions([0, 0, 2], logits), "other": Predictions([0, 1, 2], logits.flip(1) / 2)}
    rows = compare({name: partial(lambda one: one, one) for name, one in found.items()}, [0, 1, 0])
    assert rows["plain"].items() >= {"right": 1 / 3, "kept": 1, "same": 1, "kl": 0, "error": 0}.items()
    assert rows["other"].items() >= {"right": 2 / 3, "kept": 1, "same": 2 / 3}.items()
    p, q = (one.logits.softmax(-1) for one in found.values())
    assert rows["other"]["kl"] == pytest.approx((p * (p / q).log()).sum(1).mean().item(), rel=1e-4)
    for name, chances in (("plain", p), ("other", q)):
        likelihood = chances[[0, 1, 2], [0, 1, 0]].prod().item()
        assert rows[name]["perplexity"] == pytest.approx(likelihood ** (-1 / 3), rel=1e-4)
    assert comparison_table(rows).split("\n")[0].split() == ["perplexity", "right", "kept", "same", "kl", "error"]
    texts = compare({"plain": lambda: Predictions("abc", logits)}, "abd")
    assert "perplexity" not in texts["plain"] and texts["plain"]["right"] == 2 / 3


class Counting(Engine):
    """The next token is the number of those before it."""

    def __init__(self):
        self.seen = []

    def append(self, ids):
        self.seen += ids[0]
        return torch.nn.functional.one_hot(torch.tensor([len(self.seen)]), 9)


@pytest.mark.parametrize("step", [1, 2])
def test_a_text_is_read_in_steps_and_the_token_behind_each_is_predicted(step):
    ids = [5, 3, 4, 6, 7]
    found = predict_text(ids, step, engine := Counting())
    ends = [*range(step, 5, step)]
    assert found.answers == ends and engine.seen == ids[: ends[-1]] and found.logits.shape == (len(ends), 9)
    assert len(ids[step::step]) == len(ends)


def test_every_precision_reads_a_text(results_of, tmp_path):
    (tmp_path / "text.txt").write_text("A red ring is left of a blue square. " * 4)
    level = (levels_here() or ["none"])[-1]
    flags = f"--step 3 --level {level}" if levels_here() else "--step 3"
    folders = ["--model", str(EMBEDDED), "--text", str(tmp_path / "text.txt"), "--save", str(tmp_path / "out")]
    results = results_of(main, flags, *folders)
    text = next((tmp_path / "out").iterdir()).read_text()
    assert "text.txt, " in text and "3 at a time" in text
    names = [" ".join(filter(None, (*precision, level))) for precision in COMPARED]
    assert [*results][:-2] == list(dict.fromkeys(["float32 none", *names]))
    assert results[f"float32 {level}"]["kl"] < 1e-5 and results[f"float32 {level}"]["same"] == 1
    assert 0 < results[f"float32 int8 {level}"]["kl"] < 0.1


@pytest.mark.full
def test_every_precision_at_every_level_is_compared_with_plain_modules(capsys, tmp_path):
    code = main(["--compare", "--scenes", "4", "--json", "--save", str(tmp_path)])
    results = json.loads(capsys.readouterr().out)
    failures, where = results.pop("failures"), results.pop("environment")
    assert failures == captions.comparison_failures(results) and code == bool(failures) and "level" in where
    assert comparison_table(results) in next(tmp_path.iterdir()).read_text()
    names = [" ".join(filter(None, (*one, level))) for one in COMPARED for level in levels_here() or ["none"]]
    assert [*results] == list(dict.fromkeys(["float32 none", *names]))
    assert results["float32 none"] | {"right": 1} == {"right": 1, "kept": 1, "same": 1, "kl": 0, "error": 0}
    for level in levels_here():
        errors = {one: results[f"{' '.join(filter(None, one))} {level}"]["error"] for one in COMPARED}
        assert errors["float32", None] < 1e-4 < errors["float32", "int8"] < 0.1
        assert errors["bfloat16", None] < errors["bfloat16", "int4"] and results[f"float32 {level}"]["same"] == 1


@pytest.mark.slow
def test_int8_keeps_what_float32_has_right():
    assert main(["--compare", "--scenes", "100"]) == 0


@pytest.mark.parametrize(
    ("kept", "failures"),
    [(0.98, ["float32 int8 avx2 keeps less than 99% of float32's right captions"]), (0.99, [])],
)
def test_int8_that_keeps_too_little_is_a_failure(kept, failures):
    row = {"right": 0.9, "kept": kept, "same": 0.8, "kl": 0.5, "error": 0.01}
    results = {"float32 int8 avx2": row, "float32 none": row}
    assert f"float32 int8 avx2  90.0%  {kept:.1%}  80.0%  0.50000  1.00%" in comparison_table(results)
    assert captions.comparison_failures(results) == failures


@pytest.mark.full
def test_two_steps_teach_no_digits_and_a_classifier_knows_them(results_of, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(captions, "N_DIGITS", 1700)  # of 1,797
    flags = "--max-steps 2 --validation 0 --batch-size 4 --num-workers 0 --device cpu"
    found = results_of(main, "--digits", flags)
    assert found["digits"]["right"] == 0 and found["digits"]["of"] == 97 and len(found["digits"]["rows"]) == 10
    assert found["SVM on pixels"]["exact"] > 0.9
    monkeypatch.setattr(classification, "run_verb", lambda verb, argv: 1)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        main(["--digits"])
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1] == "eval.captions: train.py ended with exit code 1"
