"""Processor: numbers of tiles. test_formats.py has the layouts of prompts."""

from dataclasses import replace

import pytest
from PIL import Image

from models.config import extra_tokens
from nanovlm.errors import InputError
from nanovlm.processing.processor import Processor
from support import noise_image

IMAGE, GLOBAL = 599, 600  # ids of the embedded model's tokenizer


SQUARE, WIDE, TALL = (16, 16), (30, 14), (30, 48)  # grids of 1 x 1, 1 x 2 and 3 x 2 tiles of 16 pixels


@pytest.fixture(scope="module")
def processor(tiled):
    return tiled[1]


def encode_one(processor, sizes, prompt="Hi?"):
    """The ids of one row, and its number of tiles."""
    ids, tiles = processor.encode([noise_image(*size, seed) for seed, size in enumerate(sizes)], prompt)
    return ids, sum(map(len, tiles))


def test_missing_tile_token_is_named(processor):
    narrow = Processor(replace(processor.cfg, vlm_extra_tokens=extra_tokens(2)), processor.tokenizer)
    narrow.encode([noise_image(*WIDE)], "?")
    with pytest.raises(ValueError, match="3 x 2 tiles, but vlm_extra_tokens has no r3c2"):
        narrow.encode([noise_image(*TALL)], "?")


def test_wrong_use_is_an_error(processor):
    with pytest.raises(InputError, match="max_tiles=0 is less than 1"):
        Processor(processor.cfg, processor.tokenizer, max_tiles=0)
    for prompt in ([{"role": "user", "content": "?"}], None):
        with pytest.raises(InputError, match=f"^a prompt is one string, not {type(prompt).__name__}; .*$"):
            processor.encode([], prompt)


def test_single_tile_model_resizes_any_image_to_one_tile(model_and_processor):
    _, processor = model_and_processor
    for size in ((96, 96), (300, 90), (1092, 1092), (7, 400)):  # the resize rule would give 1092 x 1092 two tiles
        ids, images = encode_one(processor, [size])
        assert images == 1 and ids.count(IMAGE) == 36 and ids.count(GLOBAL) == 1


def tile_count_and_grid(processor, size):
    images, grid = processor.preprocess(noise_image(*size))
    return len(images), grid


@pytest.mark.parametrize(
    ("size", "max_tiles", "grid"),
    [
        ((64, 64), None, (4, 4)), ((64, 64), 16, (4, 4)), ((64, 64), 15, (3, 3)), ((64, 64), 8, (2, 2)),
        ((64, 64), 3, (1, 1)), ((64, 64), 1, (1, 1)), ((64, 20), 8, (2, 4)), ((64, 20), 7, (1, 3)),
        ((300, 2), 2, (1, 2)), ((1092, 1092), 1, (1, 1)), ((1092, 1092), 11, (2, 2)), ((3, 5), 4, (1, 1)),
    ],
)  # fmt: skip
def test_max_tiles_limits_the_grid(processor, size, max_tiles, grid):
    limited = Processor(processor.cfg, processor.tokenizer, max_tiles=max_tiles)
    rows, columns = grid
    assert tile_count_and_grid(limited, size) == (rows * columns + (grid != (1, 1)), grid)
    ids, _ = encode_one(limited, [size])
    assert ids.count(IMAGE) == 4 * (rows * columns + (grid != (1, 1)))


def test_small_images_are_enlarged_to_the_largest_side_if_the_config_says_so(processor):
    cfg = replace(processor.cfg, resize_to_max_side_len=True)
    assert tile_count_and_grid(processor, SQUARE) == (1, (1, 1))
    assert tile_count_and_grid(Processor(cfg, processor.tokenizer), SQUARE) == (17, (4, 4))
    assert tile_count_and_grid(Processor(cfg, processor.tokenizer, max_tiles=6), SQUARE) == (5, (2, 2))


@pytest.mark.parametrize("max_tiles", [None, 1, 4, 7])
def test_max_tiles_per_image_is_an_upper_bound(processor, max_tiles):
    processor = Processor(processor.cfg, processor.tokenizer, max_tiles)
    sizes = [(16, 16), (64, 64), (640, 640), (200, 90), (90, 200), (33, 64)]
    most = max(len(processor.preprocess(Image.new("RGB", size))[0]) for size in sizes)
    assert most <= processor.max_tiles_per_image and (max_tiles == 7 or most == processor.max_tiles_per_image)
