"""The projector's pixel shuffle; formats/test_backbones.py holds the vision encoder to transformers' SigLIP."""

import pytest
import torch

from models.modality_projector import pixel_shuffle


def test_pixel_shuffle_puts_the_rows_of_a_square_one_after_another():
    patches = torch.arange(36).view(1, 36, 1)
    assert pixel_shuffle(patches, 3)[0].tolist() == [
        [0, 1, 2, 6, 7, 8, 12, 13, 14],
        [3, 4, 5, 9, 10, 11, 15, 16, 17],
        [18, 19, 20, 24, 25, 26, 30, 31, 32],
        [21, 22, 23, 27, 28, 29, 33, 34, 35],
    ]


@pytest.mark.parametrize(("patches", "factor"), [(15, 1), (16, 3), (36, 4)])
def test_patches_that_are_not_a_square_are_refused(patches, factor):
    with pytest.raises(ValueError, match=f"{patches} patches .* multiple of {factor}"):
        pixel_shuffle(torch.zeros(1, patches, 2), factor)
