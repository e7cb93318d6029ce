"""Images as transformers' SmolVLM and Idefics3 models read them: resized, split into tiles, normalized, and in text.

The arithmetic of sizes is that of Idefics3ImageProcessor in transformers, in its order; an exact one would give other
grids. Resizing is Pillow's, as in its PIL variant.
"""

import math

import torch
from PIL import Image
from PIL.Image import Resampling

from models.config import SmolVLMSettings, VLMConfig
from nanovlm.errors import InputError
from nanovlm.processing.image_loading import MAX_PIXELS, as_tensor

MAX_SIDE = 4096  # pixels; transformers scales larger images down to it
Grid = tuple[int, int]


def max_tiles_per_image(cfg: VLMConfig, settings: SmolVLMSettings, max_tiles: int | None) -> int:
    """The largest number of tiles of one image, the whole image included."""
    if not settings.split or max_tiles == 1:
        return 1
    side = math.ceil(min(settings.longest_edge or MAX_SIDE, MAX_SIDE) / cfg.vit_img_size)
    return min(side**2, max_tiles or side**2) + 1 if side > 1 else 1


def preprocess(
    image: Image.Image, cfg: VLMConfig, settings: SmolVLMSettings, max_tiles: int | None = None, upscale: bool = True
) -> tuple[torch.Tensor, Grid]:
    """Tiles of an RGB image, row by row, then the whole image as one more: (n, 3, S, S) float32, and (rows, columns).

    A grid of (1, 1) is an image that is not split: one tile. max_tiles and upscale are those of `Processor`.
    """
    tile, edge = cfg.vit_img_size, settings.longest_edge
    if edge is not None and not upscale:
        edge = min(edge, math.ceil(max(image.size) / tile) * tile)
    split = settings.split and max_tiles != 1
    resized, (rows, columns) = _resize(image, edge, tile, settings.resample) if split else (image, (1, 1))
    while split and max_tiles is not None and rows * columns > max_tiles:
        edge = (max(rows, columns) - 1) * tile
        resized, (rows, columns) = _resize(image, edge, tile, settings.resample)
    if not split and edge is not None:
        resized = resized.resize(size_of_longest_edge(*image.size, edge), Resampling(settings.resample))
    whole = resized.resize((tile, tile), Resampling(settings.resample))
    tiles = as_tensor(whole)[None]
    if rows * columns > 1:
        parts = as_tensor(resized).view(3, rows, tile, columns, tile).permute(1, 3, 0, 2, 4)
        tiles = torch.cat([parts.reshape(-1, 3, tile, tile), tiles])
    mean, std = (torch.tensor(values)[:, None, None] for values in (settings.mean, settings.std))
    return (tiles.float() * settings.rescale_factor - mean) / std, (rows, columns)


def _resize(image: Image.Image, edge: int | None, tile: int, resample: int) -> tuple[Image.Image, Grid]:
    """The image resized to whole tiles, by way of its longest edge; and their grid."""
    resampling = Resampling(resample)
    first = image.size if edge is None else size_of_longest_edge(*image.size, edge)
    width, height = size_in_tiles(*first, tile)
    if width * height > MAX_PIXELS:
        raise InputError(
            f"an image of {image.width} x {image.height} would be resized to {width} x {height}, more than "
            f"{MAX_PIXELS:,} pixels; lower size.longest_edge in preprocessor_config.json"
        )
    return image.resize(first, resampling).resize((width, height), resampling), (height // tile, width // tile)


def size_of_longest_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    """Width and height with the longest edge given, the other one even, both at most MAX_SIDE."""
    aspect_ratio = width / height
    if width >= height:
        width, height = edge, int(edge / aspect_ratio)
        height += height % 2
    else:
        width, height = int(edge * aspect_ratio), edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    aspect_ratio = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / aspect_ratio)
    elif height > width and height > MAX_SIDE:
        width, height = int(MAX_SIDE * aspect_ratio), MAX_SIDE
    return max(width, 1), max(height, 1)


def size_in_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """Width and height rounded up to whole tiles, the longer side first, since it determines the other."""
    aspect_ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / aspect_ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * aspect_ratio) / tile) * tile
    return width, height


def markup(grid: Grid, cfg: VLMConfig, settings: SmolVLMSettings) -> str:
    """The text that stands for an image: the tiles by row and column, then the whole image.

    Tokens that the tokenizer does not have become plain text, as in transformers.
    """
    (rows, columns), fake = grid, settings.fake_image_token
    image = cfg.special_tokens["image_token"] * cfg.mp_image_token_length
    whole = fake + settings.global_image_token + image + fake
    if rows * columns == 1:
        return whole
    text = ""
    for row in range(1, rows + 1):
        text += "".join(f"{fake}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1)) + "\n"
    return text + "\n" + whole
