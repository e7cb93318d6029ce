"""Drawings: every shape has its color, only plain backgrounds are plain, and any size can be drawn."""

import math
from random import Random

import pytest

from nanovlm.errors import InputError
from nanovlm.synthetic import BACKGROUNDS, COLORS, Scene, draw, random_scene
from nanovlm.synthetic.drawing import TONES


def test_backgrounds_differ_from_all_colors():
    for bright, dim in TONES:
        for i in range(21):
            tone = [(i * a + (20 - i) * b) / 20 for a, b in zip(bright, dim)]
            assert all(math.dist(tone, rgb) > 75 for rgb in COLORS.values()), tone


@pytest.mark.parametrize("size", [(160, 160), (96, 96), (48, 48), (97, 161)])
def test_center_pixels_have_the_color_of_their_shape(scenes, size):
    total = right = 0
    for scene in scenes[:300]:
        image = draw(scene, *size)
        assert image.size == size and image.mode == "RGB"
        for t in scene.shapes:
            band = 0.85 * t.radius if t.kind == "ring" else 0
            x, y = t.x * size[0] + band * min(size), t.y * size[1]
            pixel = image.getpixel((round(x - 0.5), round(y - 0.5)))
            total += 1
            right += min(COLORS, key=lambda name: math.dist(pixel, COLORS[name])) == t.color
    assert right >= 0.99 * total


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_only_the_plain_background_is_plain(background):
    for seed in range(10):
        shades = draw(Scene((), background, seed), 96, 96).convert("L").histogram()
        seen = [tone for tone, n in enumerate(shades) if n]
        assert (seen[-1] - seen[0] == 0) if background == "plain" else (seen[-1] - seen[0] > 30)


def test_a_tiny_image_is_refused():
    with pytest.raises(InputError, match="8x8"):
        draw(random_scene(Random(5)), 8, 8)
