"""How images and prompts are laid out: nanoVLM's way, from which other formats' layouts differ.

Each version of nanoVLM's format adds to the one before:
1   image embeddings come first and have no tokens of their own; then "Question: ... Answer:"
2   the same, with <|image|> tokens in the image positions
3   a chat, whose first user turn begins with the <|image|> tokens. Up to here an image is resized to one tile
4   an image is split into tiles; each tile's name precedes its <|image|> tokens; several images are numbered <image: 0>
5   the whole image, resized to one more tile and named <|global_image|>, precedes its tiles
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from PIL.Image import Resampling
from torch import Tensor

from models.config import VLMConfig
from nanovlm.errors import InputError
from nanovlm.processing.conversation import Chat, Turn, dialogue, images_of
from nanovlm.processing.image_loading import MAX_PIXELS, as_tensor

Grid = tuple[int, int]  # rows and columns of an image's tiles


class Layout:
    """How a format turns images into tiles, and lays out images and text in a prompt."""

    images_in_turns = False  # images stand anywhere among the texts of a turn; else all come before all text
    end_token_ids: Sequence[int] | None = None  # of generation_config.json; by default cfg.end_token ends an answer

    def __init__(self, cfg: VLMConfig):
        self.cfg = cfg
        self.has_chat = cfg.format_version >= 3  # without a chat template, a prompt is "Question: ... Answer:"
        self.adds_text_prefix = not self.has_chat  # prompts begin with the tokens the tokenizer puts before a text
        self.splits_images = cfg.format_version >= 4
        self.has_processor = cfg.format_version >= 5  # transformers' SmolVLM processor can lay out the prompts
        self.has_global_view = cfg.format_version >= 5

    def max_tiles_per_image(self, max_tiles: int | None) -> int:
        """The largest number of tiles of one image, the view of the whole image included."""
        tiles = ((self.cfg.max_img_size or 0) // self.cfg.vit_img_size) ** 2 if self.splits_images else 1
        tiles = min(tiles, max_tiles or tiles)
        return tiles + 1 if self.has_global_view and tiles > 1 else tiles

    def preprocess(self, image: Image.Image, max_tiles: int | None) -> tuple[Tensor, Grid]:
        """Tiles of an RGB image, (n, 3, S, S) float32 in [0, 1], and their grid; the view of the whole comes first."""
        tile = self.cfg.vit_img_size
        to_max_side = bool(self.cfg.resize_to_max_side_len)
        size = self.fitting_size(max_tiles, lambda max_side: resized_size(*image.size, tile, max_side, to_max_side))
        return preprocess(image, tile, size, self.has_global_view)

    def fitting_size(self, max_tiles: int | None, rule: Callable[[int], tuple[int, int]]) -> tuple[int, int] | None:
        """The size by a resize rule with the longest side that keeps an image within max_tiles; None means one tile."""
        tile = self.cfg.vit_img_size
        max_side = self.cfg.max_img_size or 0 if self.splits_images else 0
        while max_side > tile:  # at one tile the resize rule would round some squares up to two
            width, height = rule(max_side)
            if max_tiles is None or (width // tile) * (height // tile) <= max_tiles:
                return width, height
            max_side -= tile
        return None

    def image_markups(self, grids: Sequence[Grid]) -> list[str]:
        """The text that stands for each image in a chat: the names of its tiles, each followed by its image tokens."""
        tokens = self.cfg.special_tokens
        image_tokens = tokens["image_token"] * self.cfg.mp_image_token_length
        if not self.splits_images:
            return [image_tokens] * len(grids)
        markups = []
        for i, (rows, columns) in enumerate(grids):
            text = f"<image: {i}>" if len(grids) > 1 else ""
            if self.has_global_view:
                text += tokens["global_image_token"] + image_tokens
            if not self.has_global_view or rows * columns > 1:
                if f"r{rows}c{columns}" not in tokens:
                    raise InputError(
                        f"an image of {rows} x {columns} tiles, but vlm_extra_tokens has no r{rows}c{columns}; "
                        "lower max_img_size in config.json"
                    )
                names = [tokens[f"r{row}c{column}"] for row in range(1, rows + 1) for column in range(1, columns + 1)]
                text += "".join(name + image_tokens for name in names)
            markups.append(text)
        return markups

    def special_tokens(self, added: Iterable[str]) -> list[str]:
        """Tokens that text must not produce, beside cfg.special_tokens; added are those of the tokenizer."""
        return [self.cfg.end_token]

    def arrange(self, chat: Chat, default: str | None = None) -> list[Turn]:
        """A conversation as this format was trained: all images, then user and assistant by turns.

        There is no system role: its texts come before the first question. Consecutive turns of one role are joined, an
        empty question precedes a greeting by the assistant, and default, if given, stands for a question without text.
        """
        system = [turn.text for turn in chat if turn.role == "system"]
        said = [turn for turn in chat if turn.role != "system"]
        texts = [""] if said[0].role == "assistant" else []
        for role, turns in groupby(said, lambda turn: turn.role):
            text = "\n".join(filter(None, (turn.text for turn in turns)))
            is_missing = role == "user" and not text.strip()
            texts.append(text if default is None or not is_missing else default)
        texts[0] = "\n\n".join(filter(None, [*system, texts[0]]))
        return dialogue(texts, images_of(chat))

    def content(self, turn: Turn) -> Any:
        """A turn's content as the chat template takes it; each image is one token."""
        image = self.cfg.special_tokens["image_token"]
        return "".join(part if isinstance(part, str) else image for part in turn.parts)


def resized_size(width: int, height: int, tile: int, max_side: int, to_max_side: bool) -> tuple[int, int]:
    """The size, in whole tiles, to which an image is resized: the rule of nanoVLM's DynamicResize.

    The float operations are in the order of data/custom_transforms.py there. Exact arithmetic would be wrong: a
    1092 x 1092 image rounds to 3 x 4 tiles of 512, not 3 x 3, and the weights were trained on that.
    """
    long = max(width, height)
    short = min(width, height)
    new_long = max_side if to_max_side else min(max_side, math.ceil(long / tile) * tile)
    scale = new_long / long
    new_short = max(tile, math.ceil(short * scale / tile) * tile)
    return (new_long, new_short) if width >= height else (new_short, new_long)


def preprocess(
    image: Image.Image, tile: int, size: tuple[int, int] | None = None, global_view: bool = False
) -> tuple[Tensor, Grid]:
    """Resize an RGB image and split it into tiles (n, 3, tile, tile) float32, row by row; also return (rows, columns).

    size is in whole tiles; without it the image is resized to one tile. A global view is one more tile in front: the
    resized image, resized again to a tile; an image of one tile needs none. Values are in [0, 1].
    """
    if image.mode != "RGB":
        raise InputError(f"preprocess takes RGB images, not {image.mode}: read the image with load_image")
    width, height = size or (tile, tile)
    check_size(image, width, height, "max_img_size in config.json")
    resized = image.resize((width, height), Resampling.BICUBIC if size else Resampling.BILINEAR)
    tiles = split(resized, tile).float().div_(255)
    if global_view and len(tiles) > 1:
        whole = as_tensor(resized)[None].float().div_(255)
        tiles = torch.cat([F.interpolate(whole, (tile, tile), mode="bilinear", antialias=True), tiles])
    return tiles, (height // tile, width // tile)


def check_size(image: Image.Image, width: int, height: int, setting: str) -> None:
    """InputError if an image would be resized beyond MAX_PIXELS, which `setting` of the checkpoint decides."""
    if width * height > MAX_PIXELS:
        raise InputError(
            f"an image of {image.width} x {image.height} would be resized to {width} x {height}, more than "
            f"{MAX_PIXELS:,} pixels; lower {setting}"
        )


def split(image: Image.Image, tile: int) -> Tensor:
    """The tiles of an RGB image, row by row: (n, 3, tile, tile), uint8."""
    rows, columns = image.height // tile, image.width // tile
    parts = as_tensor(image).view(3, rows, tile, columns, tile)
    return parts.permute(1, 3, 0, 2, 4).reshape(-1, 3, tile, tile).contiguous()
