"""nanoVLM's layouts. Each version of the format adds to the one before:

1   image embeddings come first and have no tokens of their own; then "Question: ... Answer:"
2   the same, with <|image|> tokens in the image positions
3   a chat, whose first user turn begins with the <|image|> tokens. Up to here an image is resized to one tile
4   an image is split into tiles; each tile's name precedes its <|image|> tokens; several images are numbered <image: 0>
5   the whole image, resized to one more tile and named <|global_image|>, precedes its tiles
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from PIL import Image
from torch import Tensor

from models.config import VLMConfig
from models.formats.nanovlm import end_token
from nanovlm.errors import InputError
from nanovlm.processing.image_processing import preprocess, resized_size
from nanovlm.processing.layouts.base import Grid, Layout

if TYPE_CHECKING:
    from nanovlm.processing.tokenizer import Tokenizer


class NanoVLMLayout(Layout):
    def __init__(self, cfg: VLMConfig):
        super().__init__(cfg)
        self.has_chat = cfg.format_version >= 3
        self.splits_images = cfg.format_version >= 4
        self.has_global_view = self.has_processor = cfg.format_version >= 5

    def max_tiles_per_image(self, max_tiles: int | None) -> int:
        tiles = ((self.cfg.max_img_size or 0) // self.cfg.vit_img_size) ** 2 if self.splits_images else 1
        tiles = min(tiles, max_tiles or tiles)
        return tiles + 1 if self.has_global_view and tiles > 1 else tiles

    def preprocess(self, image: Image.Image, max_tiles: int | None, upscale: bool) -> tuple[Tensor, Grid]:
        """Pixels are in [0, 1], and a view of the whole image comes first."""
        to_max_side = bool(self.cfg.resize_to_max_side_len) and upscale
        return preprocess(
            image,
            tile=self.cfg.vit_img_size,
            max_side=self._max_side(image.size, max_tiles, to_max_side),
            to_max_side=to_max_side,
            global_view=self.has_global_view,
        )

    def _max_side(self, size: tuple[int, int], max_tiles: int | None, to_max_side: bool) -> int | None:
        """The longest side, in pixels, that keeps an image within max_tiles; None means one tile."""
        tile, max_side = self.cfg.vit_img_size, self.cfg.max_img_size or 0 if self.splits_images else 0
        while max_side > tile:  # at one tile the resize rule would round some squares up to two
            width, height = resized_size(*size, tile, max_side, to_max_side)
            if max_tiles is None or (width // tile) * (height // tile) <= max_tiles:
                return max_side
            max_side -= tile
        return None

    def image_markups(self, grids: Sequence[Grid]) -> list[str]:
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
        return [end_token(self.cfg)]

    def answer_bounds(self, tokenizer: "Tokenizer") -> tuple[str, tuple[int, ...]]:
        return "", (tokenizer.special_id(end_token(self.cfg)),)
