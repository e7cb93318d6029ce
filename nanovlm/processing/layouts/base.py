"""Shared by layouts: grids of tiles, and splitting an image into tiles."""

from PIL import Image
from torch import Tensor

from nanovlm.errors import InputError
from nanovlm.processing.image_loading import MAX_PIXELS, as_tensor

Grid = tuple[int, int]  # rows and columns of an image's tiles


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
