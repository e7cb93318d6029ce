"""Scenes: the same seed gives the same scene, shapes are readable, and withheld pairs are never trained on."""

import math
from itertools import combinations
from random import Random

from nanovlm.synthetic import caption, names_withheld, random_scene
from nanovlm.synthetic.scene import SIZES, WITHHELD


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
