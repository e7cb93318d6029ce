"""SmolVLM's format without transformers, written out by hand; tests/nanovlm/processing/test_smolvlm.py compares."""

import json

import pytest
import tokenizers
import torch
from PIL import Image

from models.checkpoint import FORMATS
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


def test_a_prompt_is_laid_out_as_transformers_does(converted):
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


def test_pixels_are_resized_twice_and_normalized(converted):
    """By way of the longest edge, 64 x 36, to whole tiles, 64 x 48; the whole image squeezed into a tile comes last."""
    image = noise_image(70, 40)
    tiles, grid = converted.processor.preprocess(image)
    resized = image.resize((64, 36), Image.Resampling.LANCZOS).resize((64, 48), Image.Resampling.LANCZOS)
    boxes = [(x, y, x + 16, y + 16) for y in range(0, 48, 16) for x in range(0, 64, 16)]
    expected = [resized.crop(box) for box in boxes] + [resized.resize((16, 16), Image.Resampling.LANCZOS)]
    assert grid == (3, 4) and len(tiles) == 13 == converted.processor.max_tiles_per_image - 4
    torch.testing.assert_close(tiles, torch.stack([as_tensor(tile) / 127.5 - 1 for tile in expected]))
    small = Processor(converted.model.cfg, converted.tokenizer, max_tiles=1)
    assert [len(small.preprocess(image)[0]), small.max_tiles_per_image] == [1, 1]


def test_an_exported_nanovlm_says_the_same(embedded, tmp_path):
    """Its patch convolution is rescaled to pixels in [-1, 1]."""
    export_smolvlm(embedded, tmp_path / "export")
    again = Captioner.from_pretrained(tmp_path / "export", "cpu", "float32")
    image = noise_image(96, 96)
    assert not again.model.cfg.format.unit_pixels and again.caption(image) == embedded.caption(image)
