"""eval.captions: what it asks, counts and compares. tests/nanovlm/test_embedded.py pins how good the model is."""

import json
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from eval import captions
from eval.captions import accuracy_table, main, measure, predict_text
from eval.lib import labels
from eval.lib.command import levels_here
from eval.lib.labels import calibration, read_labeled, share
from eval.lib.precisions import COMPARED, Predictions, compare, comparison_table
from eval.lib.scenes import N_QUESTIONS, SPLITS, Example, make_splits
from eval.peers import Engine
from nanovlm import EMBEDDED
from nanovlm.cli.main import run_verb
from nanovlm.errors import InputError

LEVEL = (levels_here() or ["none"])[-1]
HIGHEST = f"--level {LEVEL}" if levels_here() else ""
KINDS = {
    "Is X left of Y?", "What is left of X?", "What is at the top?", "What is the background?", "What colour",
    "What shape", "How big", "How many", "Is there", "Where is",
}  # fmt: skip


def test_examples_are_about_the_scenes_and_count_in_the_rows_that_they_name():
    splits = make_splits(40, seed="eval test")
    for example in [*splits["captions"], *splits["withheld"]]:
        n_objects = example.truth.count(",") + example.truth.count(" and ") + 1
        assert example.row == f"{n_objects} object{'s' * (n_objects > 1)}"
    questions = splits["questions"]
    assert [len(splits[name]) for name in ("captions", "withheld", "questions")] == [40, 40, 120]
    assert {example.row for example in questions} == KINDS
    assert {example.image for example in questions} == {example.image for example in splits["captions"]}
    for split, start in (("relations", "Is the "), ("neighbors", "What is ")):
        images = [example.image for example in splits[split]]
        assert max(images.count(image) for image in images) == N_QUESTIONS
        assert {example.row for example in splits[split]} == {"2 objects", "3 objects", "4 objects"}
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


def test_right_answers_are_counted_by_row_and_others_listed():
    rows = ["4 objects", "1 object", "4 objects", "2 objects"]
    examples = [Example(*one) for one in zip("abcd", ["Why?", None, "Why?", None], ["a", "b", "no", "d"], rows)]
    shares, missed = measure(Parrot(), {"mine": examples})
    assert missed == [("mine", "Why?", "no", "c")]
    found = {row: (one["right"], one["of"], one["exact"]) for row, one in shares["mine"]["rows"].items()}
    assert [*found.items()] == [("1 object", (1, 1, 1)), ("2 objects", (1, 1, 1)), ("4 objects", (1, 2, 0.5))]
    _, mine, *parts = accuracy_table(shares).split("\n")
    assert mine.split()[:6] == ["mine", "75.00%", "4", "30.1%", "to", "95.4%"] and len(mine.split()) == 8
    assert [" ".join(part.split()[:2]) for part in parts] == [*found]


def test_every_split_is_reported_and_saved(results_of, tmp_path):
    results = results_of(main, "--scenes 4 --dtype float32 --save", str(tmp_path))
    assert [results[name]["of"] for name in SPLITS][:3] == [4, 4, 12]
    assert len(results["missed"]) == sum(results[name]["of"] - results[name]["right"] for name in SPLITS)
    text = next(tmp_path.iterdir()).read_text()
    assert "torch.float32" in text and accuracy_table({name: results[name] for name in SPLITS}) in text


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
    names = ["perplexity", "right", "kept", "same", "kl", "error"]
    assert comparison_table(rows).split("\n")[0].split() == names
    encoded = {name: one._replace(encoded=one.logits + 1) for name, one in found.items()}
    more = compare({name: partial(lambda one: one, one) for name, one in encoded.items()}, "xyz")
    assert comparison_table(more).split("\n")[0].split() == [*names[1:], "encoder"]
    assert more["plain"]["encoder"] == 0 < more["other"]["encoder"] == pytest.approx(more["other"]["error"])
    assert more["other"]["kept"] == 1, "of none"
    texts = compare({"plain": lambda: Predictions("abc", logits)}, "abd")
    assert "perplexity" not in texts["plain"] and texts["plain"]["right"] == 2 / 3


@pytest.mark.parametrize("step", [1, 2])
def test_a_text_is_read_in_steps_and_the_token_behind_each_is_predicted(step):
    ids = [5, 3, 4, 6, 7]
    seen = []

    class Counting(Engine):  # the next token is the number of those before it
        def append(self, new):
            seen.extend(new[0])
            return torch.nn.functional.one_hot(torch.tensor([len(seen)]), 9)

    found = predict_text(ids, step, Counting())
    ends = [*range(step, 5, step)]
    assert found.answers == ends and seen == ids[: ends[-1]] and found.logits.shape == (len(ends), 9)
    assert len(ids[step::step]) == len(ends)


def test_every_precision_reads_a_text(results_of, tmp_path):
    (tmp_path / "text.txt").write_text("A red ring is left of a blue square. " * 4)
    folders = ["--model", str(EMBEDDED), "--text", str(tmp_path / "text.txt"), "--save", str(tmp_path / "out")]
    results = results_of(main, f"--step 3 {HIGHEST}", *folders)
    text = next((tmp_path / "out").iterdir()).read_text()
    assert "text.txt, " in text and "3 at a time" in text
    names = [" ".join(filter(None, (*precision, LEVEL))) for precision in COMPARED]
    assert [*results][:-2] == list(dict.fromkeys(["float32 none", *names]))
    assert results[f"float32 {LEVEL}"]["kl"] < 1e-5 and results[f"float32 {LEVEL}"]["same"] == 1
    assert 0 < results[f"float32 int8 {LEVEL}"]["kl"] < 0.1


@pytest.mark.full
def test_every_precision_at_every_level_is_compared_with_plain_modules(capsys, tmp_path):
    code = main(["--compare", "--scenes", "4", "--json", "--save", str(tmp_path)])
    results = json.loads(capsys.readouterr().out)
    failures, where = results.pop("failures"), results.pop("environment")
    assert failures == captions.comparison_failures(results) and code == bool(failures) and "level" in where
    assert comparison_table(results) in next(tmp_path.iterdir()).read_text()
    names = [" ".join(filter(None, (*one, level))) for one in COMPARED for level in levels_here() or ["none"]]
    assert [*results] == list(dict.fromkeys(["float32 none", *names]))
    exact = {"right": 1, "kept": 1, "same": 1, "kl": 0, "error": 0, "encoder": 0}
    assert results["float32 none"] | {"right": 1} == exact
    for level in levels_here():
        errors = {one: results[f"{' '.join(filter(None, one))} {level}"]["error"] for one in COMPARED}
        assert errors["float32", None] < 1e-4 < errors["float32", "int8"] < 0.1
        assert errors["bfloat16", None] < errors["bfloat16", "int4"] and results[f"float32 {level}"]["same"] == 1


@pytest.mark.slow
def test_int8_keeps_what_float32_has_right():
    assert main(["--compare", "--scenes", "100"]) == 0


def test_int8_that_keeps_too_little_is_a_failure():
    row = {"right": 0.9, "kept": 0.98, "same": 0.8, "kl": 0.5, "error": 0.01}
    rows = {"float32 none": row, "float32 int8 avx2": row, "float32 int8 amx": row | {"kept": 0.99}}
    assert "float32 int8 avx2  90.0%  98.0%  80.0%  0.50000  1.00%" in comparison_table(rows)
    assert captions.comparison_failures(rows) == ["float32 int8 avx2 keeps less than 99% of float32's right captions"]


def test_images_are_labeled_by_their_folders(tmp_path):
    for name in ("hat/1.png", "hat/0.png", "dress/0.png"):
        with pytest.raises(InputError, match="no folders of images"):  # of one label at most
            read_labeled(tmp_path)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    expected = ["dress/0.png", "hat/0.png", "hat/1.png"]
    assert read_labeled(tmp_path) == ([str(tmp_path / name) for name in expected], ["dress", "hat", "hat"])


def test_shares_and_calibration_are_those_of_a_plain_count():
    counted = share(["a", "b ", "c"], ["a", "b", "x"])
    assert (counted["right"], counted["of"]) == (2, 3)
    low, high = counted["interval"]
    assert low < 2 / 3 < high
    found = calibration([0.95, 0.85, 0.85, 1.0], [True, True, False, True])
    assert [(one["n"], one["right"]) for one in found["bins"]] == [(2, 0.5), (2, 1.0)]
    assert found["error"] == pytest.approx((2 * 0.35 + 2 * 0.025) / 4)


QUICK = "--max-steps 2 --validation 0 --batch-size 4 --num-workers 0 --device cpu"


@pytest.mark.full
def test_two_steps_teach_no_digits_and_a_classifier_knows_them(results_of, monkeypatch, capsys, tmp_path):
    datasets = pytest.importorskip("sklearn.datasets")
    whole = datasets.load_digits()
    part = SimpleNamespace(images=whole.images[:300], target=whole.target[:300])
    monkeypatch.setattr(datasets, "load_digits", lambda: part)
    monkeypatch.setattr(labels, "N_DIGITS", 240)
    flags = ["--digits", "--flags", QUICK, "--then", QUICK, "--out", str(tmp_path)]
    found = results_of(main, "--save", str(tmp_path), *flags)
    assert found["free answers"]["right"] == 0 and found["free answers"]["of"] == 60 == len(found["missed"])
    assert len(found["free answers"]["rows"]) == 10 and 0 <= found["calibration"]["error"] <= 1
    assert found["SVM on pixels"]["exact"] > 0.9 and found["logistic regression on the encoder"]["exact"] > 0.6
    assert found["--choices"]["of"] == 60
    always = next(name for name in found if name.startswith("always the digit "))
    assert found[always]["right"] == found["free answers"]["rows"][always.removeprefix("always ")]["of"]
    text = next(tmp_path.glob("*.txt")).read_text()
    assert "expected calibration error" in text and "most often taken for another: the digit" in text
    first, then = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "then"))
    assert first != then, "trained further"
    monkeypatch.setattr(labels, "run_verb", lambda verb, argv: 1)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        main(["--digits"])
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1] == "eval.captions: train.py ended with exit code 1"


@pytest.mark.full
def test_photographs_are_learned_from_train_and_validation_and_precisions_compared(results_of, monkeypatch, tmp_path):
    pytest.importorskip("sklearn")
    for part in ("train", "validation", "test"):
        for color in ("red", "blue"):
            (tmp_path / part / color).mkdir(parents=True)
            Image.new("RGB", (32, 32), color).save(tmp_path / part / color / "0.png")
    run = Mock(wraps=run_verb)
    monkeypatch.setattr(labels, "run_verb", run)
    flags = f"--photos {tmp_path} --out {tmp_path / 'out'} --model {EMBEDDED} --compare {HIGHEST}"
    rows = results_of(main, flags, "--flags", QUICK.replace("--validation 0", ""))
    line = " ".join(run.call_args.args[1])
    assert (
        f"--model {EMBEDDED} --data {tmp_path}/train --validation {tmp_path}/validation --out {tmp_path}/out/" in line
    )
    assert rows["float32 none"]["encoder"] == 0 < rows[f"float32 int8 {LEVEL}"]["encoder"] < 0.1
