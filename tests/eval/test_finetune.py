"""eval.finetune: a few training steps run end to end."""

import json

import pytest

from eval import finetune
from eval.finetune import main
from eval.lib import classification

pytestmark = pytest.mark.full

QUICK = "--max-steps 2 --validation 0 --batch-size 4 --num-workers 0 --device cpu"


@pytest.fixture(autouse=True)
def few_digits(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(finetune, "N_TRAIN", 1700)  # of 1,797


def test_two_steps_teach_nothing_and_classifiers_know_digits(capsys):
    assert main(["--flags", QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fine-tuned"]["exact"] == found["fine-tuned"]["known"] == 0, "the model says what it said before"
    assert found["SVM on pixels"]["exact"] > 0.9 and found["neighbors"]["exact"] > 0.5


def test_a_training_that_fails_is_a_sentence_and_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(classification, "run_verb", lambda verb, argv: 1)
    with pytest.raises(SystemExit, match="1"):
        main([])
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1] == "eval.finetune: train.py ended with exit code 1"
