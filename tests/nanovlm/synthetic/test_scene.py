"""Scenes: the same seed gives the same scene, shapes are readable, and withheld pairs are never trained on."""

import math
from collections import Counter
from itertools import combinations
from random import Random

from nanovlm.synthetic import caption, names_withheld, random_scene
from nanovlm.synthetic.scene import BACKGROUNDS, COLORS, SHAPES, SIZES, WITHHELD


def test_withheld_pairs_cover_every_shape_and_color_once():
    assert len(WITHHELD) == 8
    assert {color for color, _ in WITHHELD} == set(COLORS) and {kind for _, kind in WITHHELD} == set(SHAPES)


def test_withheld_scene_names_a_withheld_pair():
    for seed in range(500):
        scene = random_scene(Random(seed), withheld=True)
        assert names_withheld(scene)
        assert any(" ".join(pair) in caption(scene) for pair in WITHHELD)


def test_shapes_are_inside_the_image_and_overlap_little(scenes):
    touching = 0
    for scene in scenes:
        for t in scene.shapes:
            assert SIZES[t.size][0] <= t.radius <= SIZES[t.size][1] and abs(t.angle) <= 8
            assert t.radius < min(t.x, t.y, 1 - t.x, 1 - t.y)
        for a, b in combinations(scene.shapes, 2):
            overlap = a.radius + b.radius - math.dist((a.x, a.y), (b.x, b.y))
            assert overlap <= 0.3 * min(a.radius, b.radius) + 1e-9
            touching += overlap > 0
    assert 0.05 < touching / len(scenes) < 0.15


def test_every_combination_of_attributes_occurs(scenes):
    shapes = [thing for scene in scenes for thing in scene.shapes]
    assert len({(t.color, t.kind, t.size) for t in shapes}) == 2 * (64 - 8)
    assert {(s.background, t.kind) for s in scenes for t in s.shapes} == {(b, s) for b in BACKGROUNDS for s in SHAPES}
    counts = Counter(len(scene.shapes) for scene in scenes)
    assert all(400 < counts[n] < 600 for n in (1, 2, 3, 4))
    assert 0.35 < sum(t.size == "large" for t in shapes) / len(shapes) < 0.6
