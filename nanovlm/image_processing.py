"""From a picture to pixels: any file Pillow reads, made upright RGB, then resized and cut into tiles.

A picture is a PIL image or where one comes from; an image is a tensor. What a picture may not be ends in a
PictureError, never in a traceback out of a decoder.
"""

import contextlib
import ctypes
import io
import logging
import math
import os
import threading
import warnings
from random import Random

import torch
import torch.nn.functional as F
from PIL import ExifTags, Image
from PIL.Image import Resampling, Transpose

from nanovlm.errors import ImageError

MAX_PIXELS = 178_956_970  # where Pillow, too, stops warning and refuses
MAX_ASPECT = 200

UPRIGHT = {  # EXIF orientation -> the way back
    2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
}  # fmt: skip

# Of a damaged file Pillow logs and libtiff prints a line of its own; nothing is to stand beside our error.
logging.getLogger("PIL").addHandler(logging.NullHandler())
with contextlib.suppress(AttributeError, OSError):  # where Pillow shows no libtiff
    ctypes.CDLL(Image.core.__file__).TIFFSetErrorHandler(None)


def load_image(source, name: str | None = None, max_pixels: int | None = None) -> Image.Image:
    """Read a picture as upright RGB, on white where it is transparent; of an animation, the first frame.

    source is a path, the bytes of a file, a binary file or a PIL image; name is what an error calls it. One of more
    than max_pixels is not decoded, nor one of more than MAX_PIXELS.
    """
    name = printable(name_of(source) if name is None else name)
    try:
        with quiet_pillow():
            if isinstance(source, Image.Image):
                return load_rgb(source, max_pixels)
            with open_file(source) as file:
                return load_rgb(Image.open(file), max_pixels)
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error, IndexError ...
        raise ImageError(f"{name}: {reason(error)}") from error


def name_of(source) -> str:
    """What to call a source that came without a name: its path, "<stdin>", or just "picture"."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    if not isinstance(source, (bytes, Image.Image)) and not hasattr(source, "read"):
        raise TypeError(f"a picture is a path, bytes, a binary file or a PIL image, not {type(source).__name__}")
    name = getattr(source, "name", None)  # of a file: its path, or a number
    return name if isinstance(name, str) else "picture"


def printable(name: str) -> str:
    """A name that stays on its line, whatever is in it."""
    return name if name and name.isprintable() else repr(name)


@contextlib.contextmanager
def open_file(source):
    """Open a path, bytes or a file as a file that can seek; a pipe is read to its end."""
    by_path = isinstance(source, (str, os.PathLike))
    with open(source, "rb") if by_path else io.BytesIO(source.read() if hasattr(source, "read") else source) as file:
        seekable = file if file.seekable() else io.BytesIO(file.read())
        if not seekable.read(1):
            raise ImageError("an empty file")
        yield seekable


def reason(error: Exception) -> str:
    """Say in one line why a picture cannot be used."""
    text = " ".join(str(error).split())
    match error:
        case ImageError():
            return text
        case Image.UnidentifiedImageError():
            return "not a picture that Pillow can read, or a damaged one"
        case Image.DecompressionBombError():
            return f"more than {MAX_PIXELS:,} pixels; scale it down first ({text})"
        case IsADirectoryError():
            return "a folder, not a picture; name the pictures in it"
        case OSError(strerror=str(words)):  # the system speaks: No such file or directory, Permission denied ...
            return words
    return f"cannot be decoded: {text or type(error).__name__}"


def load_rgb(picture: Image.Image, max_pixels: int | None = None) -> Image.Image:
    """Decode a picture into a new RGB one, turned as its EXIF orientation says."""
    width, height = picture.size  # from the header: a bomb is refused before it goes off
    if width < 1 or height < 1:
        raise ImageError(f"{width} x {height} is a picture without pixels")
    limit = MAX_PIXELS if max_pixels is None else min(max_pixels, MAX_PIXELS)
    if width * height > limit:
        raise ImageError(f"{width} x {height} is more than {limit:,} pixels; scale it down first")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"{width} x {height}: one side is more than {MAX_ASPECT} times the other; crop it first")
    picture.load()
    turn = None
    with contextlib.suppress(Exception):  # a picture with broken EXIF is still a picture
        turn = UPRIGHT.get(picture.getexif().get(ExifTags.Base.Orientation))
    rgb = to_rgb(picture)
    if turn is not None:
        rgb = rgb.transpose(turn)
    rgb.info.clear()  # or the next reader would turn it again
    return rgb


def to_rgb(picture: Image.Image) -> Image.Image:
    """Convert any mode to a new RGB picture, transparency composed on white."""
    if picture.mode.startswith("I"):
        picture = grey_from_integers(picture)
    elif picture.mode == "F":
        picture = grey_from_floats(picture)
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    if picture.mode == "La":  # Pillow knows one way out of it
        picture = picture.convert("LA")
    picture = picture.convert("RGBA")
    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture)
    return white


def grey_from_integers(picture: Image.Image) -> Image.Image:
    """Scale 0 .. 65535 to 8 bits (Pillow's own convert clips at 255), keeping a transparent grey level."""
    values = picture.convert("I")
    grey = values.point([(v + 128) // 257 for v in range(65536)], "L")
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(values.point([0 if v == transparent else 255 for v in range(65536)], "L"))
    return grey


def grey_from_floats(picture: Image.Image) -> Image.Image:
    """Scale floats to 8 bits: from 0 .. 1 or 0 .. 255 if all lie there, else from the lowest .. the highest."""
    values = as_tensor(picture).double()
    finite = values[values.isfinite()]
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
    if low >= 0 and high <= 255:
        low, high = 0.0, 1.0 if high <= 1 else 255.0
    values = (values.nan_to_num(low, high, low) - low) / (high - low or 1.0)
    return Image.frombytes("L", picture.size, bytes((values * 255).round().int().flatten().tolist()))


def as_tensor(picture: Image.Image) -> torch.Tensor:
    """The values of a picture, (channels, height, width): float32 of mode F, else uint8."""
    width, height = picture.size
    dtype = torch.float32 if picture.mode == "F" else torch.uint8
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=dtype).view(height, width, -1).permute(2, 0, 1)


def random_crop(picture: Image.Image, most: float, rng: Random) -> Image.Image:
    """The picture without a margin: on each side, at random, up to most of its width or height."""
    left, top, right, bottom = (int(rng.uniform(0, most) * side) for side in 2 * picture.size)
    return picture.crop((left, top, picture.width - right, picture.height - bottom))


_readers, _filters, _lock = 0, None, threading.Lock()


@contextlib.contextmanager
def quiet_pillow():
    """Keep Pillow's warnings (odd EXIF, large pictures) off the screen while a picture is read.

    Warning filters belong to the whole process, so the first reader in sets ours and the last one out restores:
    threads that each kept and restored their own could leave the wrong ones behind.
    """
    global _readers, _filters
    with _lock:
        if _readers == 0:
            _filters = warnings.catch_warnings()
            _filters.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\.")
        _readers += 1
    try:
        yield
    finally:
        with _lock:
            _readers -= 1
            if _readers == 0:
                _filters.__exit__(None, None, None)


def resized_size(width: int, height: int, tile: int, max_side: int, to_max_side: bool) -> tuple[int, int]:
    """Say the size, in whole tiles, at which a picture is cut: the rule of nanoVLM's DynamicResize.

    The order of the float operations is that of data/custom_transforms.py there. Exact arithmetic would be nicer and
    wrong: a 1092 x 1092 picture rounds to 3 x 4 tiles of 512, not 3 x 3, and the weights were trained on that.
    """
    if max_side % tile:
        raise ValueError(f"max_side={max_side} must be a multiple of tile={tile}")
    long, short = max(width, height), min(width, height)
    new_long = max_side if to_max_side else min(max_side, math.ceil(long / tile) * tile)
    scale = new_long / long
    new_short = max(tile, math.ceil(short * scale / tile) * tile)
    return (new_long, new_short) if width >= height else (new_short, new_long)


def preprocess(
    picture: Image.Image, *, tile: int, max_side=None, to_max_side=False, global_view=False, mean=None, std=None
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Resize an RGB picture and cut it into images (n, 3, tile, tile), row by row; also return (rows, columns).

    Without max_side the whole picture is squeezed into one tile. A global view is one more image, in front: the resized
    picture squeezed into a tile; a picture of one tile needs none. Values lie in [0, 1] unless mean and std are given.
    """
    if picture.mode != "RGB":
        raise ValueError(f"pixels are made from RGB, not from {picture.mode}: pass the picture through open_picture")
    if (mean is None) != (std is None):
        raise ValueError(f"mean={mean} and std={std} must be given together")
    size, filter = (tile, tile), Resampling.BILINEAR
    if max_side is not None:
        size, filter = resized_size(*picture.size, tile, max_side, to_max_side), Resampling.BICUBIC
    width, height = size
    if width * height > MAX_PIXELS:
        old = " x ".join(map(str, picture.size))
        raise ValueError(
            f"a picture of {old} would be resized to {width} x {height}, more than {MAX_PIXELS:,} pixels; lower "
            f"max_side={max_side}, which is max_img_size in config.json"
        )
    rows, columns = height // tile, width // tile
    whole = as_tensor(picture.resize(size, filter))  # (3, height, width), uint8
    tiles = whole.view(3, rows, tile, columns, tile).permute(1, 3, 0, 2, 4).reshape(-1, 3, tile, tile)
    images = tiles.contiguous().float().div_(255)
    if global_view and len(tiles) > 1:
        view = F.interpolate(whole[None].float().div_(255), (tile, tile), mode="bilinear", antialias=True)
        images = torch.cat([view, images])
    if mean is not None:
        images = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    return images, (rows, columns)
