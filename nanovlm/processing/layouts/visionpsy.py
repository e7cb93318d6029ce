"""VisionPsy's layout: nanoVLM's fifth, and for Flash another resize rule for images of few pixels."""

from typing import cast

from PIL import Image
from torch import Tensor

from models.formats.visionpsy import VisionPsy
from nanovlm.processing.layouts.nanovlm import Grid, Layout, preprocess, resized_size


class VisionPsyLayout(Layout):
    def preprocess(self, image: Image.Image, max_tiles: int | None) -> tuple[Tensor, Grid]:
        """Split as nanoVLM does, but by Flash's resize rule where the format has a min_side and max_tiles allows it."""
        tile = self.cfg.vit_img_size
        min_side = cast(VisionPsy, self.cfg.format).min_side
        if min_side is None:
            return super().preprocess(image, max_tiles)
        size = self.fitting_size(max_tiles, lambda max_side: flash_size(*image.size, tile, max_side, min_side))
        if size is None:
            return super().preprocess(image, 1)
        return preprocess(image, tile, size, self.has_global_view)


def flash_size(width: int, height: int, tile: int, max_side: int, min_side: int) -> tuple[int, int]:
    """The size, in whole tiles, of Flash's resize rule, in exact integers below min_side."""
    long = max(width, height)
    short = min(width, height)
    if short >= min_side:
        return resized_size(width, height, tile, max_side, False)
    new_long = min(max_side, -(-long * min_side // (short * tile)) * tile)
    new_short = max(-(-min_side // tile) * tile, tile)
    return (new_long, new_short) if width >= height else (new_short, new_long)
