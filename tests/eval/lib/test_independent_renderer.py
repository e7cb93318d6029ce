"""The independent renderer draws what the scene says, in another way than training's."""

import math
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from eval.lib import independent_renderer
from eval.lib.independent_renderer import BACKGROUNDS, COLOR_SPREAD, TONES, draw, outline
from nanovlm import synthetic
from nanovlm.synthetic import COLORS, SHAPES, SIZES, Scene, Shape, random_scene

STEP = 0.005
GRID = np.arange(-1.3, 1.3, STEP) + STEP / 2
U, V = GRID[None, :], GRID[:, None]


def scene_of(kind, color="red", background="plain", seed=0, radius=0.3):
    return Scene((Shape(kind, color, "large", 0.5, 0.5, radius, 0.0, (0, 0, 0)),), background, seed)


def pixels(scene, width=120, height=120):
    return np.asarray(draw(scene, width, height)).astype(float)


@pytest.mark.parametrize(
    ("inside", "area"),
    [
        (lambda: independent_renderer.circle(U, V, 0.9), math.pi * 0.81),
        (lambda: independent_renderer.square(U, V, 0.8, 0), 1.6**2),
        (lambda: independent_renderer.square(U, V, 0.8, 0.25), 1.6**2 - (4 - math.pi) * 0.25**2),
        (lambda: independent_renderer.triangle(U, V, 0.7), 0.7 * 1.6),
        (lambda: independent_renderer.diamond(U, V, 0.6), 2 * 0.6),
        (lambda: independent_renderer.star(U, V, 0.35), 5 * 0.35 * math.sin(math.pi / 5)),
        (lambda: independent_renderer.star(U, V, 0.6), 5 * 0.6 * math.sin(math.pi / 5)),
        (lambda: independent_renderer.cross(U, V, 0.14), 8 * 0.14 - 4 * 0.14**2),
        (lambda: independent_renderer.ring(U, V, 0.8), math.pi * (1 - 0.64)),
        (lambda: independent_renderer.heart_curve(U, V), 3.6619 / 1.2**2),  # of the curve, by quadrature
    ],
)
def test_outlines_cover_the_area_of_their_formula(inside, area):
    assert np.broadcast_to(inside(), (V.size, U.size)).sum() * STEP**2 == pytest.approx(area, rel=0.01)


@pytest.mark.parametrize("kind", SHAPES)
def test_every_outline_is_whole_and_its_proportions_vary(kind):
    """Its width or height is 1.5 to 2.2 radii, so that its size can be read, and it ends where its canvas does."""
    areas = set()
    for seed in range(20):
        inside = np.broadcast_to(outline(kind, Random(seed))(U, V), (V.size, U.size))
        rows, columns = inside.any(1).sum() * STEP, inside.any(0).sum() * STEP
        assert 1.5 <= max(rows, columns) <= 2.2
        assert np.hypot(U, V)[inside].max() < independent_renderer.REACH
        areas.add(round(inside.sum() * STEP**2, 2))
    assert len(areas) >= (2 if kind == "heart" else 6)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_middle_shows_the_color_or_the_hole(kind):
    for seed, color in product(range(4), COLORS):
        middle = pixels(scene_of(kind, color, seed=seed))[60, 60]
        distance = np.abs(middle - COLORS[color]).max()
        assert distance > 40 if kind == "ring" else distance <= COLOR_SPREAD + 0.07 * 255


@pytest.mark.parametrize("kind", SHAPES)
def test_a_shape_lies_where_the_scene_says(kind):
    """Flat, rimmed and lit: the pixels of its color have their middle near (x, y), on images of any proportions."""
    for seed in range(6):
        shape = replace(scene_of(kind, "blue").shapes[0], x=0.3, y=0.6, radius=0.16, angle=7.0)
        for width, height in ((160, 120), (120, 160)):
            image = pixels(Scene((shape,), "plain", seed), width, height)
            ys, xs = np.nonzero(np.abs(image - COLORS["blue"]).max(-1) < 40)
            assert (xs.min() + xs.max()) / 2 == pytest.approx(0.3 * width, abs=4)
            assert (ys.min() + ys.max()) / 2 == pytest.approx(0.6 * height, abs=5)


@pytest.mark.parametrize("color", COLORS)
def test_every_tone_is_far_from_every_color(color):
    for first, second in TONES:
        for share in np.linspace(0, 1, 11):
            tone = (1 - share) * np.array(first) + share * np.array(second)
            assert math.dist(tone, COLORS[color]) >= 65, (first, second, share)


def test_the_colors_of_a_scene_are_closest_to_their_names():
    """No rim or shadow shows a color that the scene does not name: only its edges may, by mixing two others."""
    rng = Random("colors")
    for _ in range(20):
        scene = random_scene(rng)
        image = pixels(replace(scene, background="plain"), 160, 160)
        near = {color: (np.linalg.norm(image - rgb, axis=-1) < 35).sum() for color, rgb in COLORS.items()}
        named = {shape.color for shape in scene.shapes}
        assert min(near[color] for color in named) > 2 * max(near[color] for color in COLORS if color not in named)


def test_backgrounds_are_the_scenes_and_differ():
    assert BACKGROUNDS.keys() == set(synthetic.BACKGROUNDS)
    for name in BACKGROUNDS:
        image = pixels(Scene((), name, 1), 128, 96).mean(-1)
        assert image.shape == (96, 128)
        assert image.std() == 0 if name == "plain" else image.std() > 4, name
    glow = pixels(Scene((), "glowing", 3)).mean(-1)
    assert glow[40:80, 40:80].mean() > glow[[0, -1]].mean() + 5, "bright in the middle"


def test_an_image_depends_on_the_scene_alone_and_is_not_trainings():
    scene = random_scene(Random("same"))
    assert (pixels(scene) == pixels(scene)).all()
    assert (pixels(scene) != pixels(replace(scene, seed=scene.seed + 1))).any()
    assert (pixels(scene) != np.asarray(synthetic.draw(scene, 120, 120))).mean() > 0.5
    assert SIZES["small"][1] < SIZES["large"][0], "a size follows from the scene's radius"
