"""eval.finetune: a few training steps run end to end."""

import json

import pytest

from eval.finetune import main
from eval.lib import finetune_study

pytestmark = pytest.mark.full

QUICK = "--max-steps 2 --batch-size 4 --num-workers 0 --device cpu --log-every 2"


def test_two_steps_teach_nothing_and_do_not_unteach(capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("skimage")
    ways = ["adapters", "scenes mixed in"]
    assert main(["--sets", "faces", "--ways", *ways, "--flags", QUICK, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["faces"]
    assert list(found) == [*ways, "SVM on pixels", "neighbors"]
    assert all(found[way]["exact"] == found[way]["known"] == 0 for way in ways), "the model says what it said before"
    assert found["scenes mixed in"]["scenes"] > 0.5 and "scenes" not in found["adapters"]
    assert found["SVM on pixels"]["exact"] > 0.9
    assert "120 examples" in err and "scenes: " in err, "train.py reports its data"


def test_the_table_names_the_share_of_scenes():
    found = {"default": {"exact": 0.9, "seconds": 3.0}, "scenes mixed in": {"exact": 0.8, "scenes": 0.75}}
    assert finetune_study.cell(found, "default") == "90.0%" and finetune_study.cell(found, "adapters") == ""
    assert finetune_study.cell(found, "scenes mixed in") == "80.0% and 75.0% of scenes"


def test_a_training_that_fails_is_a_sentence_and_exit_code_1(capsys, monkeypatch):
    pytest.importorskip("skimage")
    monkeypatch.setattr(finetune_study, "run_verb", lambda verb, argv: 1)
    assert main(["--sets", "faces", "--ways", "adapters"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1] == "eval.finetune: faces, adapters: train.py ended with exit code 1"
