"""What fine-tuning gives: the new world is what it says, the door is opened with a few steps, and, slow, the bars."""

import json
from random import Random

import pytest
from PIL import Image

from eval import finetune
from eval.finetune import FLAGS, LEAST, Learned, main
from eval.lib.postcards import ABOVE, GROUNDS, THINGS, TIMES, draw, random_postcard, write_folder
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.synthetic import BACKGROUNDS, COLOURS, SHAPES

QUICK = "--steps 2 --batch-size 4 --workers 0 --device cpu --log-every 2"


def test_a_postcard_is_a_pure_function_of_its_seed_and_its_words_tell_it_apart():
    cards = [random_postcard(Random(i)) for i in range(300)]
    assert cards[:50] == [random_postcard(Random(i)) for i in range(50)]
    assert draw(cards[0]).tobytes() == draw(cards[0]).tobytes() and draw(cards[0]) != draw(cards[1])
    told = {(card.number, card.thing, card.ground, card.above, card.time): card.caption for card in cards}
    assert len(set(told.values())) == len(told) > 150
    assert cards[0].caption.startswith(f"{cards[0].time}. ")


def test_its_words_are_not_those_of_scenes():
    ours = {word.lower() for words in (TIMES, GROUNDS, THINGS, ABOVE) for word in words}
    assert not ours & {*SHAPES, *COLOURS, *BACKGROUNDS}
    tokenizer = Captioner.from_pretrained(EMBEDDED, "cpu").tokenizer
    assert all(len(tokenizer.encode(f" {word}")) > 1 for word in ours), "no token of the embedded model's"


def test_the_folder_is_one_as_anybody_has_it(tmp_path):
    cards = [random_postcard(Random(i)) for i in range(3)]
    write_folder(tmp_path / "postcards", cards)
    assert sorted(path.name for path in (tmp_path / "postcards").iterdir()) == [
        f"00{i}.{kind}" for i in range(3) for kind in ("png", "txt")
    ]
    with Image.open(tmp_path / "postcards/001.png") as picture:
        assert picture.tobytes() == draw(cards[1]).tobytes()
    assert (tmp_path / "postcards/001.txt").read_text() == f"{cards[1].caption}\n"


def test_two_steps_teach_nothing_and_every_missed_bar_is_told(capsys):
    assert main(["--pictures", "6", "--fresh", "4", "--flags", QUICK, "--json"]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["before"]["postcards"] == 0 and told["before"]["scenes"] > 0.5
    assert [learned["way"] for learned in told["learned"]] == list(FLAGS)
    for learned in told["learned"]:
        assert learned["postcards"] == 0 and learned["seconds"] > 0
        way, (least, _) = learned["way"], LEAST[learned["way"]]
        assert f"{way}: 0.0% of postcards are right, less than {least:.0%}" in told["failures"]
    assert err.splitlines()[-len(told["failures"]) :] == told["failures"]
    assert "6 examples" in err and "scenes: " in err, "train.py said what it learns from"


def test_every_bar_holds_alone():
    assert Learned("adapters", 180.0, 0.85, 0.0).failures == []
    assert Learned("scenes mixed in", 180.0, 0.9, 0.8).failures == []
    (told,) = Learned("scenes mixed in", 180.0, 0.9, 0.79).failures
    assert told == "scenes mixed in: 79.0% of scenes are right, less than 80%"
    (told,) = Learned("all weights", 181.0, 0.9, 0.0).failures
    assert told == "all weights: 181 s are more than 3 minutes"


def test_a_training_that_fails_is_a_sentence(capsys, monkeypatch):
    monkeypatch.setattr(finetune, "door", lambda verb, argv: 1)
    assert main(["adapters", "--pictures", "1", "--fresh", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1] == "adapters: train.py ended with exit code 1"


@pytest.mark.parametrize("flags", [["sideways"], ["--fresh", "0"], ["--pictures", "0"]])
def test_wrong_flags_are_one_line_and_exit_code_2(capsys, flags):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_two_hundred_pictures_and_three_minutes_teach_a_new_world(capsys):
    """On 2 CPU cores: about nine minutes."""
    assert main(["--seed", "2"]) == 0, capsys.readouterr().err
