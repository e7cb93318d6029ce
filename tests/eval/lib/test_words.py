"""Pictures of printed text: the text is all inside, readable, and in the fonts that a split names."""

import io
import re
from random import Random

import numpy as np
import pytest
from PIL import Image

from eval.lib import words
from eval.lib.words import (
    MARGIN,
    MAX_LENGTH,
    ROWS,
    SAME_IN_BOTH_CASES,
    STRINGS,
    WORDS,
    draw_word,
    layout,
    load_font,
    make_word_splits,
    random_string,
)
from nanovlm.errors import MissingExtraError
from nanovlm.synthetic.words import TRAINED_FONTS, UNSEEN_FONTS, find_fonts

FONTS = [*find_fonts(TRAINED_FONTS), *find_fonts(UNSEEN_FONTS)]
PATTERNS = {
    "capitals": "[A-Z]+",
    "numbers": "[0-9]+",
    "capitals and digits": "[A-HJ-NP-Z2-9]+",
    "small words": "[a-z]+",
}


@pytest.mark.parametrize("kind", STRINGS)
def test_strings_are_of_their_kind_and_tell_their_case(kind):
    rng = Random(kind)
    texts = [random_string(rng, kind) for _ in range(300)]
    assert {len(text) for text in texts} == set(range(3 if kind == "small words" else 1, MAX_LENGTH + 1))
    for text in texts:
        assert re.fullmatch(PATTERNS[kind], text) and set(text.lower()) - SAME_IN_BOTH_CASES
    assert len(set(texts)) > 150


def test_the_words_differ_and_have_every_length_that_is_asked_for():
    assert len(set(WORDS)) == len(WORDS) > 300
    assert {len(word) for word in WORDS} == {3, 4, 5, 6}


@pytest.mark.parametrize("font", FONTS, ids=lambda font: font.stem if font else "Aileron")
def test_the_text_lies_inside_the_image_and_is_large_enough(font):
    """Measured on the drawn pixels: those unlike the paper lie inside the margins, at least 5 pixels high at 96."""
    rng = Random(font.stem if font else "Aileron")
    for text in ("W", "Q7", "quick", "WMWMWM", "WMWMWM", "letter"):
        for width, height in ((96, 96), (160, 120), (120, 160)):
            seed = rng.random()
            size, (x, y) = layout(text, font, width, height, Random(seed))
            left, top, right, bottom = load_font(font, size).getbbox(text)
            assert MARGIN * width - 1 <= x + left and x + right <= width * (1 - MARGIN) + 1
            assert MARGIN * height - 1 <= y + top and y + bottom <= height * (1 - MARGIN) + 1
            assert 96 * (bottom - top) / height >= 5
            image = np.asarray(draw_word(text, font, width, height, Random(seed), False)).astype(float)
            ys, xs = np.nonzero(np.abs(image - np.median(image, (0, 1))).max(-1) > 60)
            assert xs.min() > 0 and xs.max() < width - 1 and ys.min() > 0 and ys.max() < height - 1
            assert xs.max() - xs.min() >= (0.1 if len(text) == 1 else 0.25) * width


@pytest.mark.parametrize("light_on_dark", [False, True])
def test_ink_and_paper_contrast(light_on_dark):
    rng = Random("contrast")
    for _ in range(10):
        gray = np.asarray(draw_word("HELP", None, 128, 96, rng, light_on_dark).convert("L")).astype(float)
        paper = np.median(gray)
        ink = gray.max() if light_on_dark else gray.min()
        assert (ink - paper) * (1 if light_on_dark else -1) > 100


def test_each_split_has_its_own_fonts_and_every_example_its_rows():
    splits = make_word_splits(60, "test")
    names = {
        split: {path.stem if path else "Aileron" for path in find_fonts(families)}
        for split, families in words.SPLITS.items()
    }
    assert names["trained fonts"].isdisjoint(names["unseen fonts"])
    for split, examples in splits.items():
        assert len(examples) == 60
        assert {example.rows["font"] for example in examples} <= names[split]
        assert {example.rows["ink"] for example in examples} == {"dark on light", "light on dark"}
        for example in examples:
            assert tuple(example.rows) == ROWS
            assert example.rows["length"].split()[0] == str(len(example.truth))
            with Image.open(io.BytesIO(example.image)) as image:
                assert image.format == "PNG" and 96 <= min(image.size) <= max(image.size) <= 256
    again = make_word_splits(60, "test")
    assert again == splits and make_word_splits(60, "other") != splits


def test_right_answers_are_counted_by_row_and_misses_are_listed():
    """A reader that knows the numbers only."""

    class Reader:
        def captions(self, images, prompt, batch_size):
            assert prompt == "What does it say?"
            examples = [e for split in make_word_splits(40, "test").values() for e in split]
            truths = {example.image: example.truth for example in examples}
            return iter([truths[image] if truths[image].isdigit() else "?" for image in images])

    results = words.measure_words(Reader(), 40, "test", 8)
    for split in words.SPLITS:
        kinds = results[split]["rows"]["kind"]
        assert kinds["numbers"]["right"] == kinds["numbers"]["of"] > 0 == kinds["small words"]["right"]
        assert results[split]["right"] < results[split]["of"] == 40
        for rows in results[split]["rows"].values():
            assert sum(row["of"] for row in rows.values()) == 40
            assert sum(row["right"] for row in rows.values()) == results[split]["right"]
    n_missed = sum(results[split]["of"] - results[split]["right"] for split in words.SPLITS)
    assert len(results["missed"]) == n_missed and all(answer == "?" for *_, answer in results["missed"])


def test_a_missing_font_names_the_extra(monkeypatch):
    monkeypatch.setattr(words, "SPLITS", {"trained fonts": {"no_such_fonts": ("Regular",)}})
    with pytest.raises(MissingExtraError, match=r"nanovlm\[fonts\]"):
        make_word_splits(1, "test")
