"""VisionPsy's resize rules, by worked examples, and its config."""

import pytest

from models.errors import CheckpointError
from models.formats.visionpsy import is_flash
from nanovlm.processing.layouts.nanovlm import resized_size
from nanovlm.processing.layouts.visionpsy import flash_size

SIZES = {  # image -> Standard, Flash
    (256, 256): ((2048, 2048), (512, 512)), (640, 480): ((2048, 1536), (1024, 512)),
    (640, 488): ((2048, 2048), (1024, 512)), (1024, 768): ((2048, 1536), (1024, 1024)),
    (1200, 800): ((2048, 1536), (1536, 1024)), (3000, 1000): ((2048, 1024),) * 2, (300, 2000): ((512, 2048),) * 2,
    (5000, 100): ((2048, 512),) * 2, (1920, 1080): ((2048, 1536),) * 2, (512, 511): ((2048, 2048), (1024, 512)),
    (513, 512): ((2048, 2048), (1024, 1024)), (1092, 1092): ((2048, 2048), (1536, 2048)),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    assert (resized_size(*size, 512, 2048, True), flash_size(*size, 512, 2048, 512)) == SIZES[size]


def test_what_makes_a_model_flash():
    assert is_flash({"is_flash": True, "variant": "nano"}) and is_flash({"variant": "nano-flash"})
    assert is_flash({"resize_to_max_side_len": False}) and not is_flash({}) and not is_flash({"variant": "plain"})
    with pytest.raises(CheckpointError, match="variant='x'"):
        is_flash({"variant": "x"})
