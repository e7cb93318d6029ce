"""Fixtures of the tests of synthetic scenes."""

from random import Random

import pytest

from nanovlm.synthetic import questions, random_scene


@pytest.fixture(scope="package")
def scenes():
    return [random_scene(Random(seed)) for seed in range(2000)]


@pytest.fixture(scope="package")
def asked(scenes):
    """The scenes with their questions."""
    return [(scene, questions(scene, Random(i))) for i, scene in enumerate(scenes)]
