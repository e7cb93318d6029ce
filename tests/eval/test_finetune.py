"""eval.finetune: a few training steps run end to end; the slow test pins the limits."""

import json

import pytest

from eval import finetune
from eval.finetune import MIN_SHARES, TRAIN_FLAGS, Result, main

QUICK = "--max-steps 2 --batch-size 4 --num-workers 0 --device cpu --log-every 2"


@pytest.mark.parametrize("ways", [["adapters"], pytest.param([*TRAIN_FLAGS], marks=pytest.mark.full)], ids=len)
def test_two_steps_teach_nothing_and_every_missed_limit_is_printed(capsys, ways):
    assert main([*ways, "--images", "6", "--fresh", "4", "--flags", QUICK, "--json"]) == 1
    out, err = capsys.readouterr()
    results = json.loads(out)
    assert results["before"]["postcards"] == 0 and results["before"]["scenes"] > 0.5
    assert [learned["way"] for learned in results["learned"]] == ways
    for learned in results["learned"]:
        assert learned["postcards"] == 0 and learned["seconds"] > 0
        way, (minimum, _) = learned["way"], MIN_SHARES[learned["way"]]
        assert f"{way}: 0.0% of postcards are right, less than {minimum:.0%}" in results["failures"]
    assert err.splitlines()[-len(results["failures"]) :] == results["failures"]
    assert "6 examples" in err and ("scenes: " in err) == (len(ways) > 1), "train.py reports its data"


def test_each_limit_is_checked_alone():
    assert Result("adapters", 180.0, 0.85, 0.0).failures == []
    assert Result("scenes mixed in", 180.0, 0.9, 0.8).failures == []
    (message,) = Result("scenes mixed in", 180.0, 0.9, 0.79).failures
    assert message == "scenes mixed in: 79.0% of scenes are right, less than 80%"
    (message,) = Result("all weights", 181.0, 0.9, 0.0).failures
    assert message == "all weights: 181 s are more than 3 minutes"


def test_a_training_that_fails_is_a_sentence_and_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(finetune, "run_verb", lambda verb, argv: 1)
    assert main(["adapters", "--images", "1", "--fresh", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1] == "eval.finetune: adapters: train.py ended with exit code 1"


@pytest.mark.slow
def test_two_hundred_images_and_three_minutes_teach_a_new_domain(capsys):
    """On 2 CPU cores: about nine minutes."""
    assert main(["--seed", "2"]) == 0, capsys.readouterr().err
