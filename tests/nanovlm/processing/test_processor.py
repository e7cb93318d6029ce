"""Processor: numbers of tiles. test_formats.py has the layouts of prompts."""

from dataclasses import replace

import pytest

from models.config import extra_tokens
from nanovlm.errors import InputError
from nanovlm.processing.conversation import Turn
from nanovlm.processing.processor import Processor
from support import noise_image
from support.generation import prompt_of

SIZES = [(16, 16), (64, 64), (640, 640), (200, 90), (90, 200), (33, 64)]


@pytest.fixture(scope="module")
def processor(tiled):
    return tiled[1]


def test_wrong_use_is_an_error(processor):
    narrow = Processor(replace(processor.cfg, vlm_extra_tokens=extra_tokens(2)), processor.tokenizer)
    prompt_of(narrow, [noise_image(30, 14)], "?")
    with pytest.raises(ValueError, match="3 x 2 tiles, but vlm_extra_tokens has no r3c2"):
        prompt_of(narrow, [noise_image(30, 48)], "?")
    with pytest.raises(InputError, match="max_tiles=0 is less than 1"):
        Processor(processor.cfg, processor.tokenizer, max_tiles=0)
    for prompt in ([{"role": "user", "content": "?"}], None):
        with pytest.raises(InputError, match=f"^a prompt is one string, not {type(prompt).__name__}; .*$"):
            prompt_of(processor, [], prompt)


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([], "the last message must be the user's"),
        ([Turn("system", ("Be brief.",))], "the last message must be the user's"),
        ([Turn("user", ("a",)), Turn("assistant", ("b",))], "the last message must be the user's"),
        ([Turn("user", ("  ",))], "the last user message is empty"),
        ([Turn("assistant", ("a", None)), Turn("user", ("b",))], "only messages of the user may contain images"),
    ],
)
def test_a_conversation_without_a_question_is_refused(processor, turns, words):
    with pytest.raises(InputError, match=words):
        processor.encode(turns)


def test_single_tile_model_resizes_any_image_to_one_tile(model_and_processor):
    _, processor = model_and_processor
    image, whole = map(processor.tokenizer.special_id, ("<|image|>", "<|global_image|>"))
    for size in ((96, 96), (300, 90), (1092, 1092), (7, 400)):  # the resize rule would give 1092 x 1092 two tiles
        ids, tiles = prompt_of(processor, [noise_image(*size)], "Hi?")
        assert [len(one) for one in tiles] == [1] and ids.count(image) == 36 and ids.count(whole) == 1


@pytest.mark.parametrize(
    ("size", "max_tiles", "grid", "to_max_side"),
    [
        ((64, 64), None, (4, 4), False), ((64, 64), 16, (4, 4), False), ((64, 64), 15, (3, 3), False),
        ((64, 64), 8, (2, 2), False), ((64, 64), 3, (1, 1), False), ((64, 64), 1, (1, 1), False),
        ((64, 20), 8, (2, 4), False), ((64, 20), 7, (1, 3), False), ((300, 2), 2, (1, 2), False),
        ((1092, 1092), 1, (1, 1), False), ((1092, 1092), 11, (2, 2), False), ((3, 5), 4, (1, 1), False),
        ((16, 16), None, (1, 1), False), ((16, 16), None, (4, 4), True), ((16, 16), 6, (2, 2), True),
    ],
)  # fmt: skip
def test_max_tiles_limits_the_grid(processor, size, max_tiles, grid, to_max_side):
    """With resize_to_max_side_len small images are enlarged to the largest side."""
    cfg = replace(processor.cfg, resize_to_max_side_len=to_max_side)
    limited = Processor(cfg, processor.tokenizer, max_tiles=max_tiles)
    ids, (tiles,) = prompt_of(limited, [noise_image(*size)], "Hi?")
    n = grid[0] * grid[1] + (grid != (1, 1))
    assert limited.preprocess(noise_image(*size))[1] == grid and len(tiles) == n
    assert ids.count(processor.tokenizer.image_token_id) == 4 * n


@pytest.mark.parametrize("max_tiles", [None, 1, 4, 7])
def test_max_tiles_per_image_is_an_upper_bound(processor, max_tiles):
    processor = Processor(processor.cfg, processor.tokenizer, max_tiles)
    most = max(len(processor.preprocess(noise_image(*size))[0]) for size in SIZES)
    assert most <= processor.max_tiles_per_image and (max_tiles == 7 or most == processor.max_tiles_per_image)
