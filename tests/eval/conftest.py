"""Small models in the published layouts."""

import json
from dataclasses import replace

import pytest

from eval.lib.random_model import SHAPES
from support.checkpoints import small


@pytest.fixture
def results_of(capsys):
    """Run a command with a line of flags and more of them, which must succeed; the results that it prints."""

    def run(main, line="", *more):
        assert main([*line.split(), *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="session")
def small_230m():
    """The 230M model's layout with one image token per image, and a network that takes no time."""
    layout = {"vit_patch_size": 64, "mp_pixel_shuffle_factor": 8, "mp_image_token_length": 1, "max_img_size": 1024}
    return replace(small(SHAPES["230M"][0], 1000), **layout, lm_hidden_dim=64, lm_inter_dim=96, lm_n_heads=4)
