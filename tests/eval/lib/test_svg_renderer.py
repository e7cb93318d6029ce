"""The renderer in SVG draws what the scene says, in another way than training's."""

import math
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch

from eval.lib.svg_renderer import COLOR_SPREAD, TONES, draw
from nanovlm import synthetic
from nanovlm.processing.image_loading import as_tensor
from nanovlm.synthetic import BACKGROUNDS, COLORS, SHAPES, Scene, Shape, random_scene

pytestmark = pytest.mark.full
pytest.importorskip("resvg_py")


def scene_of(kind, color="red", seed=0):
    return Scene((Shape(kind, color, "large", 0.5, 0.5, 0.3, 0.0, (0, 0, 0)),), "plain", seed)


def pixels(scene, width=120, height=120):
    """(height, width, 3)"""
    return as_tensor(draw(scene, width, height)).permute(1, 2, 0).float()


def distance(image, color):
    return (image - torch.tensor(COLORS[color])).abs().amax(-1)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_middle_shows_the_color_or_the_hole(kind):
    for seed, color in product(range(4), COLORS):
        middle = distance(pixels(scene_of(kind, color, seed)), color)[60, 60]
        assert middle > 40 if kind == "ring" else middle <= COLOR_SPREAD + 0.07 * 255


@pytest.mark.parametrize("kind", SHAPES)
def test_a_shape_lies_where_the_scene_says_in_its_size(kind):
    """Flat, rimmed and lit, on images of any proportions: its width or height is 1.3 to 2.1 radii."""
    areas = set()
    for seed, (width, height) in product(range(6), ((160, 120), (120, 160))):
        shape = replace(scene_of(kind, "blue").shapes[0], x=0.3, y=0.6, radius=0.16)
        inside = distance(pixels(Scene((shape,), "plain", seed), width, height), "blue") < 40
        ys, xs = inside.nonzero().T
        assert (xs.min() + xs.max()) / 2 == pytest.approx(0.3 * width, abs=4)
        assert (ys.min() + ys.max()) / 2 == pytest.approx(0.6 * height, abs=5)
        sides = max(xs.max() - xs.min(), ys.max() - ys.min()) + 1
        assert 1.3 <= sides / (0.16 * 120) <= 2.1
        areas.add(int(inside.sum()))
    assert len(areas) >= 4, "its proportions vary"


@pytest.mark.parametrize("color", COLORS)
def test_every_tone_is_far_from_every_color(color):
    for first, second in TONES:
        for share in range(11):
            tone = [a + (b - a) * share / 10 for a, b in zip(first, second)]
            assert math.dist(tone, COLORS[color]) >= 65, (first, second, share)


def test_the_colors_of_a_scene_are_closest_to_their_names():
    """No rim or shadow shows a color that the scene does not name: only its edges may, by mixing two others."""
    rng = Random("colors")
    for _ in range(20):
        scene = random_scene(rng)
        image = pixels(replace(scene, background="plain"), 160, 160)
        near = {c: ((image - torch.tensor(rgb)).norm(dim=-1) < 35).sum() for c, rgb in COLORS.items()}
        named = {shape.color for shape in scene.shapes}
        assert min(near[color] for color in named) > 2 * max(near[color] for color in COLORS if color not in named)


@pytest.mark.parametrize("name", BACKGROUNDS)
def test_backgrounds_are_the_scenes_and_of_two_tones(name):
    image = pixels(Scene((), name, 1), 128, 96)
    assert image.shape == (96, 128, 3)
    assert image.std((0, 1)).sum() == 0 if name == "plain" else (image.std((0, 1)) > 3).all(), name
    if name == "glowing":
        assert image[30:60, 50:80].mean() > image[[0, -1]].mean() + 5, "bright in the middle"


def test_an_image_depends_on_the_scene_alone_and_is_not_trainings():
    scene = random_scene(Random("same"))
    assert (pixels(scene) == pixels(scene)).all()
    assert (pixels(scene) != pixels(replace(scene, seed=scene.seed + 1))).any()
    theirs = as_tensor(synthetic.draw(scene, 120, 120)).permute(1, 2, 0)
    assert (pixels(scene) != theirs).float().mean() > 0.5
