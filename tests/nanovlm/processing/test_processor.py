"""Processor: numbers of tiles, and SmolVLM's layout written out by hand. test_formats.py has nanoVLM's layouts."""

import json
from dataclasses import replace

import pytest
import tokenizers
import torch
from PIL import Image

from models.checkpoint import FORMATS
from models.config import extra_tokens
from models.inference.caches import TiledImage
from nanovlm import Captioner
from nanovlm.errors import InputError
from nanovlm.export.transformers import export_smolvlm
from nanovlm.processing.conversation import Turn, dialogue
from nanovlm.processing.convert import check_format, convert_layout
from nanovlm.processing.image_loading import as_tensor
from nanovlm.processing.layouts import LAYOUTS
from nanovlm.processing.processor import Processor
from nanovlm.processing.tokenizer import Tokenizer
from support import noise_image
from support.generation import prompt_of

SIZES = [(16, 16), (64, 64), (640, 640), (200, 90), (90, 200), (33, 64)]


@pytest.fixture(scope="module")
def processor(tiled):
    return tiled[1]


def test_wrong_use_and_a_conversation_without_a_question_are_errors(processor):
    narrow = Processor(replace(processor.cfg, vlm_extra_tokens=extra_tokens(2)), processor.tokenizer)
    prompt_of(narrow, [noise_image(30, 14)], "?")
    with pytest.raises(ValueError, match="3 x 2 tiles, but vlm_extra_tokens has no r3c2"):
        prompt_of(narrow, [noise_image(30, 48)], "?")
    with pytest.raises(InputError, match="max_tiles=0 is less than 1"):
        Processor(processor.cfg, processor.tokenizer, max_tiles=0)
    for prompt in ([{"role": "user", "content": "?"}], None):
        with pytest.raises(InputError, match=f"^a prompt is one string, not {type(prompt).__name__}; .*$"):
            prompt_of(processor, [], prompt)
    for turns, words in (
        ([], "the last message must be the user's"),
        ([Turn("system", ("Be brief.",))], "the last message must be the user's"),
        ([Turn("user", ("a",)), Turn("assistant", ("b",))], "the last message must be the user's"),
        ([Turn("user", ("  ",))], "the last user message is empty"),
        ([Turn("assistant", ("a", None)), Turn("user", ("b",))], "only messages of the user may contain images"),
    ):
        with pytest.raises(InputError, match=words):
            processor.encode(turns)


def test_single_tile_model_resizes_any_image_to_one_tile(model_and_processor):
    _, processor = model_and_processor
    image, whole = map(processor.tokenizer.special_id, ("<|image|>", "<|global_image|>"))
    for size in ((96, 96), (300, 90), (1092, 1092), (7, 400)):  # the resize rule would give 1092 x 1092 two tiles
        ids, tiles = prompt_of(processor, [noise_image(*size)], "Hi?")
        assert [len(one) for one in tiles] == [1] and ids.count(image) == 36 and ids.count(whole) == 1


LIMITED = [  # size, max_tiles, grid, resize_to_max_side_len
    ((64, 64), None, (4, 4), False), ((64, 64), 16, (4, 4), False), ((64, 64), 15, (3, 3), False),
    ((64, 64), 8, (2, 2), False), ((64, 64), 3, (1, 1), False), ((64, 64), 1, (1, 1), False),
    ((64, 20), 8, (2, 4), False), ((64, 20), 7, (1, 3), False), ((300, 2), 2, (1, 2), False),
    ((1092, 1092), 1, (1, 1), False), ((1092, 1092), 11, (2, 2), False), ((3, 5), 4, (1, 1), False),
    ((16, 16), None, (1, 1), False), ((16, 16), None, (4, 4), True), ((16, 16), 6, (2, 2), True),
]  # fmt: skip


@pytest.mark.parametrize(("size", "max_tiles", "grid", "to_max_side"), LIMITED)
def test_max_tiles_limits_the_grid(processor, size, max_tiles, grid, to_max_side):
    """With resize_to_max_side_len small images are enlarged to the largest side."""
    cfg = replace(processor.cfg, resize_to_max_side_len=to_max_side)
    limited = Processor(cfg, processor.tokenizer, max_tiles=max_tiles)
    ids, (tiles,) = prompt_of(limited, [noise_image(*size)], "Hi?")
    n = grid[0] * grid[1] + (grid != (1, 1))
    assert limited.tiled(noise_image(*size)).grid == grid and len(tiles) == n
    assert ids.count(processor.tokenizer.image_token_id) == 4 * n


def test_max_tiles_per_image_is_an_upper_bound(processor):
    for max_tiles in (None, 1, 4, 7):
        limited = Processor(processor.cfg, processor.tokenizer, max_tiles)
        most = max(limited.tiled(noise_image(*size)).n_tiles for size in SIZES)
        assert most <= limited.max_tiles_per_image and (max_tiles == 7 or most == limited.max_tiles_per_image)


IMAGE = "<image>" * 4
FAKE = "<fake_token_around_image>"
WHOLE = f"{FAKE}<global-img>{IMAGE}{FAKE}"


@pytest.fixture(scope="module")
def converted(tiled):
    """A tiny model in SmolVLM's layout, with tiles of 16 pixels and a longest edge of 64."""
    model, processor = tiled
    return Captioner(*convert_layout(model, processor.tokenizer))


def test_every_format_has_a_layout_and_another_one_is_refused(converted):
    assert {"nanovlm", *(find().name for find in FORMATS.values())} == {*LAYOUTS}
    with pytest.raises(InputError, match="format=nanovlm, but this model was trained in SmolVLM's layout; use smolvlm"):
        check_format(converted.model.cfg, "nanovlm")


def test_a_prompt_and_its_pixels_are_laid_out_as_transformers_does(converted):
    processor = converted.processor
    wide, small = TiledImage(None, grid=(2, 3)), TiledImage(None, grid=(1, 1))
    turns = [Turn("user", [wide, "Hi"]), Turn("assistant", ["Yes."]), Turn("user", [small, "What is this?"])]
    ids = processor.encode(turns)
    rows = [[f"{FAKE}<row_{row}_col_{column}>{IMAGE}" for column in (1, 2, 3)] for row in (1, 2)]
    tiles = "".join("".join(row) + "\n" for row in rows) + "\n" + WHOLE
    assert processor.tokenizer.backend.decode(ids, skip_special_tokens=False) == (
        f"<|im_start|>User:{tiles}Hi<end_of_utterance>\nAssistant: Yes.<end_of_utterance>\n"
        f"User:{WHOLE}What is this?<end_of_utterance>\nAssistant:"
    )
    assert processor.tokenizer.answer_prefix == " "
    ends = [processor.tokenizer.backend.id_to_token(id) for id in processor.tokenizer.eos_token_ids]
    assert ends == ["<end_of_utterance>"]
    image = noise_image(70, 40)
    tiled = converted.processor.tiled(image)
    resized = image.resize((64, 36), Image.Resampling.LANCZOS).resize((64, 48), Image.Resampling.LANCZOS)
    boxes = [(x, y, x + 16, y + 16) for y in range(0, 48, 16) for x in range(0, 64, 16)]
    expected = [resized.crop(box) for box in boxes] + [resized.resize((16, 16), Image.Resampling.LANCZOS)]
    assert tiled.grid == (3, 4) and tiled.n_tiles == 13 == converted.processor.max_tiles_per_image - 4
    torch.testing.assert_close(tiled.tiles, torch.stack([as_tensor(tile) / 127.5 - 1 for tile in expected]))
    small = Processor(converted.model.cfg, converted.tokenizer, max_tiles=1)
    assert [small.tiled(image).n_tiles, small.max_tiles_per_image] == [1, 1]


def test_special_tokens_in_the_text_of_turns_are_plain_text(converted):
    """Tokens of the layout even if tokenizer.json lists them as ordinary tokens."""
    tokens = {"<image>": 4, "<end_of_utterance>": 1, FAKE: 2, "<global-img>": 1, "<row_1_col_1>": 0}
    listed = json.loads(converted.tokenizer.to_json())
    for token in listed["added_tokens"]:
        token["special"] = token["content"] == "<end_of_utterance>"
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(listed)), converted.model.cfg)
    chat = dialogue(["".join(tokens)], [TiledImage(None, grid=(1, 1))])
    ids = Processor(converted.model.cfg, tokenizer).encode(chat)
    assert {token: ids.count(tokenizer.special_id(token)) for token in tokens} == tokens


def test_an_exported_nanovlm_says_the_same(embedded, tmp_path):
    """Its patch convolution is rescaled to pixels in [-1, 1]."""
    export_smolvlm(embedded, tmp_path / "export")
    again = Captioner.from_pretrained(tmp_path / "export", "cpu", "float32")
    image = noise_image(96, 96)
    assert not again.model.cfg.format.unit_pixels and again.caption(image) == embedded.caption(image)
