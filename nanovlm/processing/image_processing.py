"""From an RGB image to tiles: resize it by the rule of nanoVLM's formats, and split it."""

import math
from random import Random

import torch
import torch.nn.functional as F
from PIL import Image
from PIL.Image import Resampling

from nanovlm.errors import InputError
from nanovlm.processing.image_loading import MAX_PIXELS, as_tensor

MAX_ASPECT_RATIO = 200


def random_crop(image: Image.Image, max_margin: float, rng: Random) -> Image.Image:
    """Crop each side by a random part of the width or height, up to max_margin of it."""
    from torchvision.transforms.v2.functional import crop  # here, so that captions do not wait for its import

    left, top, right, bottom = (int(rng.uniform(0, max_margin) * side) for side in 2 * image.size)
    return crop(image, top, left, image.height - top - bottom, image.width - left - right)


def resized_size(width: int, height: int, tile: int, max_side: int, to_max_side: bool) -> tuple[int, int]:
    """The size, in whole tiles, to which an image is resized: the rule of nanoVLM's DynamicResize.

    The float operations are in the order of data/custom_transforms.py there. Exact arithmetic would be wrong: a
    1092 x 1092 image rounds to 3 x 4 tiles of 512, not 3 x 3, and the weights were trained on that.
    """
    if max_side % tile:
        raise InputError(f"max_side={max_side} must be a multiple of tile={tile}")
    long, short = max(width, height), min(width, height)
    new_long = max_side if to_max_side else min(max_side, math.ceil(long / tile) * tile)
    scale = new_long / long
    new_short = max(tile, math.ceil(short * scale / tile) * tile)
    return (new_long, new_short) if width >= height else (new_short, new_long)


def preprocess(
    image: Image.Image,
    *,
    tile: int,
    max_side: int | None = None,
    to_max_side: bool = False,
    global_view: bool = False,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Resize an RGB image and split it into tiles (n, 3, tile, tile) float32, row by row; also return (rows, columns).

    Without max_side the whole image is resized to one tile. A global view is one more tile in front: the resized image,
    resized again to a tile; an image of one tile needs none. Values are in [0, 1] unless mean and std are given.
    """
    if image.mode != "RGB":
        raise InputError(f"preprocess takes RGB images, not {image.mode}: read the image with load_image")
    if (mean is None) != (std is None):
        raise InputError(f"mean={mean} and std={std} must be given together")
    size, resampling = (tile, tile), Resampling.BILINEAR
    if max_side is not None:
        size, resampling = resized_size(*image.size, tile, max_side, to_max_side), Resampling.BICUBIC
    width, height = size
    if width * height > MAX_PIXELS:
        raise InputError(
            f"an image of {image.width} x {image.height} would be resized to {width} x {height}, more than "
            f"{MAX_PIXELS:,} pixels; lower max_side={max_side}, which is max_img_size in config.json"
        )
    rows, columns = height // tile, width // tile
    resized = as_tensor(image.resize(size, resampling))  # (3, height, width), uint8
    tiles = resized.view(3, rows, tile, columns, tile).permute(1, 3, 0, 2, 4).reshape(-1, 3, tile, tile)
    tiles = tiles.contiguous().float().div_(255)
    if global_view and len(tiles) > 1:
        view = F.interpolate(resized[None].float().div_(255), (tile, tile), mode="bilinear", antialias=True)
        tiles = torch.cat([view, tiles])
    if mean is not None:
        tiles = (tiles - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    return tiles, (rows, columns)
