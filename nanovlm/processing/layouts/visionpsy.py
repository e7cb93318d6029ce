"""VisionPsy's layout: nanoVLM's fifth, and for Flash another resize rule for images of few pixels."""

from PIL import Image
from PIL.Image import Resampling
from torch import Tensor

from models.formats.visionpsy import VisionPsy
from nanovlm.errors import InputError
from nanovlm.processing.image_loading import MAX_PIXELS
from nanovlm.processing.layouts import Grid
from nanovlm.processing.layouts.nanovlm import NanoVLMLayout, preprocess, resized_size


class VisionPsyLayout(NanoVLMLayout):
    def preprocess(self, image: Image.Image, max_tiles: int | None, upscale: bool) -> tuple[Tensor, Grid]:
        """As nanoVLM, after an image whose short side is below min_side was resized by Flash's rule."""
        tile, max_side = self.cfg.vit_img_size, self.cfg.max_img_size or 0
        min_side = self.cfg.format.min_side if isinstance(self.cfg.format, VisionPsy) else None
        if min_side is None or min(image.size) >= min_side or max_side <= tile:
            return super().preprocess(image, max_tiles, upscale)
        while max_side > tile:
            width, height = size = flash_size(*image.size, tile, max_side, min_side)
            if max_tiles is None or (width // tile) * (height // tile) <= max_tiles:
                break
            max_side -= tile
        else:
            return super().preprocess(image, 1, upscale)
        if width * height > MAX_PIXELS:
            raise InputError(f"an image would be resized to {width} x {height}; lower max_img_size in config.json")
        resized = image.resize(size, Resampling.BICUBIC)  # of whole tiles, so that the next resize changes nothing
        return preprocess(resized, tile=tile, max_side=max(size), to_max_side=True, global_view=self.has_global_view)


def flash_size(width: int, height: int, tile: int, max_side: int, min_side: int | None) -> tuple[int, int]:
    """The size, in whole tiles, of Flash's resize rule, in exact integers below min_side."""
    long, short = max(width, height), min(width, height)
    if min_side is None or short >= min_side:
        return resized_size(width, height, tile, max_side, False)
    new_long = min(max_side, -(-long * min_side // (short * tile)) * tile)
    new_short = max(-(-min_side // tile) * tile, tile)
    return (new_long, new_short) if width >= height else (new_short, new_long)
