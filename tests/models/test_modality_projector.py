"""The projector's pixel shuffle; formats/test_backbones.py holds the vision encoder to transformers' SigLIP."""

import pytest
import torch

from models.modality_projector import pixel_shuffle


def test_pixel_shuffle_puts_the_rows_of_a_square_one_after_another():
    squares = pixel_shuffle(torch.arange(36).view(1, 36, 1), 3)[0].tolist()
    assert squares[:2] == [[0, 1, 2, 6, 7, 8, 12, 13, 14], [3, 4, 5, 9, 10, 11, 15, 16, 17]]
    assert squares[2:] == [[i + 18 for i in row] for row in squares[:2]]
    for patches, factor in ((15, 1), (16, 3), (36, 4)):
        with pytest.raises(ValueError, match=f"{patches} patches .* multiple of {factor}"):
            pixel_shuffle(torch.zeros(1, patches, 2), factor)
