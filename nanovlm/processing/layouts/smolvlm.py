"""Images as transformers' SmolVLM and Idefics3 models read them: resized, split into tiles, normalized, and in text.

The arithmetic of sizes is that of Idefics3ImageProcessor in transformers, in its order; an exact one would give other
grids. Resizing is Pillow's, as in its PIL variant.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from PIL import Image
from PIL.Image import Resampling
from torch import Tensor

from models.config import VLMConfig
from models.formats.smolvlm import SmolVLM
from nanovlm.processing.conversation import Chat, Turn, is_asked
from nanovlm.processing.layouts.nanovlm import Grid, Layout, check_size, split

MAX_SIDE = 4096  # pixels; transformers scales larger images down to it
ROW_AND_COLUMN = re.compile(r"<row_\d+_col_\d+>")


class SmolVLMLayout(Layout):
    images_in_turns = True

    def __init__(self, cfg: VLMConfig):
        super().__init__(cfg)
        self.has_chat = self.has_processor = self.adds_text_prefix = True
        self.settings = cast(SmolVLM, cfg.format)
        self.end_token_ids = self.settings.end_token_ids

    def max_tiles_per_image(self, max_tiles: int | None) -> int:
        if not self.settings.split or max_tiles == 1:
            return 1
        side = math.ceil(min(self.settings.longest_edge or MAX_SIDE, MAX_SIDE) / self.cfg.vit_img_size)
        return min(side**2, max_tiles or side**2) + 1 if side > 1 else 1

    def preprocess(self, image: Image.Image, max_tiles: int | None) -> tuple[Tensor, Grid]:
        """Pixels are normalized. The tiles come row by row, then the whole image as one more.

        A grid of (1, 1) is an image that is not split: one tile.
        """
        settings = self.settings
        tile = self.cfg.vit_img_size
        resampling = Resampling(settings.resample)
        edge = settings.longest_edge
        resized = image
        rows, columns = (1, 1)
        if settings.split and max_tiles != 1:
            resized, (rows, columns) = _resize(image, edge, tile, resampling)
            while max_tiles is not None and rows * columns > max_tiles:
                edge = (max(rows, columns) - 1) * tile
                resized, (rows, columns) = _resize(image, edge, tile, resampling)
        elif edge is not None:
            resized = image.resize(size_of_longest_edge(*image.size, edge), resampling)
        tiles = split(resized.resize((tile, tile), resampling), tile)
        if rows * columns > 1:
            tiles = torch.cat([split(resized, tile), tiles])
        mean, std = (torch.tensor(values)[:, None, None] for values in (settings.mean, settings.std))
        return (tiles.float() * settings.rescale_factor - mean) / std, (rows, columns)

    def image_markups(self, grids: Sequence[Grid]) -> list[str]:
        """The tiles by row and column, then the whole image.

        Tokens that the tokenizer does not have become plain text, as in transformers.
        """
        fake = self.settings.fake_image_token
        image = self.cfg.special_tokens["image_token"] * self.cfg.mp_image_token_length
        whole = fake + self.settings.global_image_token + image + fake
        markups = []
        for rows, columns in grids:
            text = ""
            for row in range(1, rows + 1) if rows * columns > 1 else ():
                text += "".join(f"{fake}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1)) + "\n"
            markups.append(text + "\n" + whole if text else whole)
        return markups

    def special_tokens(self, added: Iterable[str]) -> list[str]:
        markers = [self.settings.fake_image_token, self.settings.global_image_token]
        return [token for token in (*markers, *filter(ROW_AND_COLUMN.fullmatch, added)) if token]

    def arrange(self, chat: Chat, default: str | None = None) -> list[Turn]:
        """Turns as they are. Adjacent texts are joined, as together they could spell a special token."""
        turns = [(turn.role, [*turn.parts]) for turn in chat]
        if default and not is_asked(chat):
            next(parts for role, parts in reversed(turns) if role == "user").append(default)
        return [Turn(role, _joined(parts)) for role, parts in turns]

    def content(self, turn: Turn) -> list[dict[str, str]]:
        return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in turn.parts]


def _joined(parts: Sequence[Any]) -> list[Any]:
    joined: list[Any] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined or [""]


def _resize(image: Image.Image, edge: int | None, tile: int, resampling: Resampling) -> tuple[Image.Image, Grid]:
    """The image resized to whole tiles, by way of its longest edge; and their grid."""
    first = image.size if edge is None else size_of_longest_edge(*image.size, edge)
    width, height = size_of_long_side(*first, math.ceil(max(first) / tile) * tile, tile)
    check_size(image, width, height, "size.longest_edge in preprocessor_config.json")
    return image.resize(first, resampling).resize((width, height), resampling), (height // tile, width // tile)


def size_of_longest_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    """Width and height with the longest edge given, the other one even, both at most MAX_SIDE."""
    width, height = (max(side, 1) for side in size_of_long_side(width, height, edge, 2))
    if max(width, height) > MAX_SIDE:
        width, height = size_of_long_side(width, height, MAX_SIDE)
    return max(width, 1), max(height, 1)


def size_of_long_side(width: int, height: int, long: int, step: int = 1) -> tuple[int, int]:
    """Width and height with the longer side given, which determines the other, rounded up to whole steps."""
    aspect_ratio = width / height
    if width >= height:
        return long, math.ceil(int(long / aspect_ratio) / step) * step
    return math.ceil(int(long * aspect_ratio) / step) * step, long
