"""Postcards are a drawn domain that shares no words with the scenes of the embedded model."""

from random import Random

from PIL import Image

from eval.lib.postcards import GROUNDS, SKY_THINGS, THINGS, TIMES, draw, random_postcard, write_folder
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.synthetic import BACKGROUNDS, COLORS, SHAPES


def test_a_postcard_is_a_pure_function_of_its_seed_and_captions_are_unique():
    cards = [random_postcard(Random(i)) for i in range(300)]
    assert cards[:50] == [random_postcard(Random(i)) for i in range(50)]
    assert draw(cards[0]).tobytes() == draw(cards[0]).tobytes() and draw(cards[0]) != draw(cards[1])
    captions = {(card.number, card.thing, card.ground, card.above, card.time): card.caption for card in cards}
    assert len(set(captions.values())) == len(captions) > 150
    assert cards[0].caption.startswith(f"{cards[0].time}. ")


def test_its_words_are_not_those_of_scenes():
    words = {word.lower() for group in (TIMES, GROUNDS, THINGS, SKY_THINGS) for word in group}
    assert not words & {*SHAPES, *COLORS, *BACKGROUNDS}
    tokenizer = Captioner.from_pretrained(EMBEDDED, "cpu").tokenizer
    assert all(len(tokenizer.encode(f" {word}")) > 1 for word in words), "no token of the embedded model's"


def test_a_folder_holds_images_and_captions_beside_them(tmp_path):
    cards = [random_postcard(Random(i)) for i in range(3)]
    write_folder(tmp_path / "postcards", cards)
    assert sorted(path.name for path in (tmp_path / "postcards").iterdir()) == [
        f"00{i}.{kind}" for i in range(3) for kind in ("png", "txt")
    ]
    with Image.open(tmp_path / "postcards/001.png") as image:
        assert image.tobytes() == draw(cards[1]).tobytes()
    assert (tmp_path / "postcards/001.txt").read_text() == f"{cards[1].caption}\n"
