"""Pictures of printed text: the text is inside, readable by its contrast, and in a font that exists."""

import math
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from PIL import Image, ImageChops

from nanovlm.errors import MissingExtraError
from nanovlm.synthetic import words
from nanovlm.synthetic.words import (
    TRAINED_FONTS,
    UNSEEN_FONTS,
    PrintedText,
    draw_text,
    find_fonts,
    random_text,
    text_caption,
)


def test_fonts_are_different_files_and_none_is_both_trained_and_unseen():
    trained, unseen = find_fonts(TRAINED_FONTS), find_fonts(UNSEEN_FONTS)
    assert len(trained) == len(set(trained)) >= 20 and len(unseen) == len(set(unseen)) == 6
    assert not set(TRAINED_FONTS) & set(UNSEEN_FONTS)
    assert all(isinstance(path, Path) and path.is_file() for path in (*trained[1:], *unseen)) and trained[0] is None


def test_a_missing_font_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"Some-Regular.*nanovlm\[fonts\]"):
        find_fonts({"font_of_nobody": ("Some-Regular",)})


def test_texts_are_of_one_kind_and_two_to_six_characters():
    texts = [random_text(Random(i), [None]).text for i in range(2000)]
    assert set(map(len, texts)) == {2, 3, 4, 5, 6}
    assert all(
        text.isdigit() or (text.isalpha() and text in (text.upper(), text.lower(), text.title())) for text in texts
    )
    kinds = Counter(
        "digits" if t.isdigit() else "upper" if t.isupper() else "lower" if t.islower() else "title" for t in texts
    )
    assert min(kinds.values()) > 100 and not any(set(text.lower()) <= set("cosvwxz") for text in texts)
    assert len(set(texts)) > 1500


@pytest.mark.parametrize("size", [(96, 96), (256, 200), (100, 130)])
def test_the_text_is_inside_the_image_and_stands_out(size):
    fonts = find_fonts(TRAINED_FONTS) + find_fonts(UNSEEN_FONTS)
    for i, font in enumerate(fonts * 3):
        image = draw_text(PrintedText(random_text(Random(i), fonts).text, font, "plain", i), *size)
        assert image.size == size and image.mode == "RGB"
        colors = {rgb: n for n, rgb in image.getcolors(maxcolors=size[0] * size[1])}
        background = max(colors, key=colors.get)
        left, top, right, bottom = ImageChops.difference(image, Image.new("RGB", size, background)).getbbox()
        assert right - left >= 0.2 * size[0] and bottom - top >= 0.06 * size[1]
        assert max(math.dist(rgb, background) for rgb in colors) > 100


def test_a_picture_is_a_function_of_its_values():
    text = random_text(Random(3), [None])
    assert draw_text(text, 120, 96).tobytes() == draw_text(text, 120, 96).tobytes()
    assert text_caption(PrintedText("EXIT", None, "plain", 0)) == 'The text "EXIT" on a plain background.'


def test_no_text_is_cut():
    """The ink of the turned text reaches the rim of its canvas at most in faint pixels, and the canvas fits."""
    for i, font in enumerate(find_fonts(TRAINED_FONTS) + find_fonts(UNSEEN_FONTS)):
        mask = words._text_mask(PrintedText("Wgj8", font, "plain", i), Random(i), 96, 96)
        assert mask.width <= 100 and mask.height <= 96
        rim = [mask.getpixel((x, y)) for x in range(mask.width) for y in (0, mask.height - 1)]
        rim += [mask.getpixel((x, y)) for x in (0, mask.width - 1) for y in range(mask.height)]
        assert max(rim) < 128, font
