"""Image files: find and decode whatever Pillow reads, to upright RGB.

A file or PIL image that cannot be used raises ImageError. Importing this module changes no setting of Pillow; decoding
does, once for the process: see `prepare_pillow`.
"""

import base64
import contextlib
import ctypes
import errno
import functools
import importlib.util
import io
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard

from PIL import ExifTags, Image, ImageEnhance, PngImagePlugin, features
from PIL.Image import Transpose

from models.common import files
from nanovlm.console import printable
from nanovlm.errors import ImageError, needs_extra

if TYPE_CHECKING:
    import torch

MAX_PIXELS = 178_956_970  # Pillow's own limit: beyond it, Image.open raises DecompressionBombError
MAX_ASPECT_RATIO = 200

# Formats in Pillow's registry that are no images, are not decoded, or are programs that Ghostscript would run.
NOT_IMAGES = {"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "PDF", "WMF"}
CODECS = {"AVIF": "avif", "JPEG2000": "jpg_2000", "WEBP": "webp"}  # formats that Pillow may be built without
BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64}")  # fewer characters hold no image
HEIF_EXTENSIONS = {".heic", ".heics", ".heif", ".heifs", ".hif"}
HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}  # of a file's first box, ftyp
NO_LOG = logging.NullHandler()
INSTALL_HEIC = "pip install 'nanovlm[heic]'"
# Extensions of images that people have; those that cannot be read here are counted, not passed over in silence.
IMAGE_EXTENSIONS = HEIF_EXTENSIONS | {
    ".avif", ".jp2", ".jxl", ".svg", ".eps", ".wmf", ".emf",
    ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".raf", ".rw2",
}  # fmt: skip

UPRIGHT = {  # EXIF orientation -> the transposition that undoes it
    2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
}  # fmt: skip


@functools.cache
def readable_extensions() -> frozenset[str]:
    """The extensions, lower-case and with their dot, of the images that can be read here."""
    with warnings.catch_warnings(action="ignore"):  # features.check warns of codecs that an old Pillow does not know
        missing = {format for format, codec in CODECS.items() if not features.check(codec)}
    by_extension = Image.registered_extensions()  # imports every plugin of Pillow
    formats = Image.OPEN.keys() - NOT_IMAGES - missing
    extensions = {extension for extension, format in by_extension.items() if format in formats} | {".mpo"}
    return frozenset(extensions | (HEIF_EXTENSIONS if importlib.util.find_spec("pillow_heif") else set()))


def load_image(
    source: Any, name: str | None = None, max_pixels: int | None = None, side: int | None = None
) -> Image.Image:
    """Decode an image to upright RGB, on white where it is transparent; of an animation, the first frame.

    source is a path, the bytes of a file, a binary file, which is read from its beginning, either of them as the
    {"bytes", "path"} of a data set, a PIL image, a numpy array or a tensor (see `from_array`); errors call it name. An
    image of more than max_pixels, or of more than MAX_PIXELS, is refused before it is decoded. Of a JPEG file, no more
    is decoded than pixels of side x side need. Raises ImageError, at once for a path of a pipe or a device.
    """
    if isinstance(source, dict) and source.keys() & {"bytes", "path"}:
        name = name or source.get("path") or "image"
        source = source.get("path") if source.get("bytes") is None else source["bytes"]
    name = printable(source_name(source) if name is None else name)
    prepare_pillow()
    try:
        if isinstance(source, Image.Image):
            return load_rgb(source, max_pixels, side)
        if is_array(source):
            return load_rgb(from_array(source), max_pixels, side)
        with open_file(source) as file:
            return load_rgb(open_image(file), max_pixels, side)
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error, IndexError ...
        raise ImageError(f"{name}: {reason(error)}") from error


def thumbnail(source: Any, side: int, quality: int) -> bytes:
    """JPEG of an image within side x side pixels. Raises ImageError."""
    image = load_image(source, side=side)
    image.thumbnail((side, side))
    image.save(file := io.BytesIO(), "JPEG", quality=quality)
    return file.getvalue()


def load_or_fetch(source: Any, allow_urls: bool) -> Image.Image:
    """Load a source that may be an http(s) URL if allow_urls is True; see `load_image`."""
    if not (isinstance(source, str) and re.match("https?://", source, re.IGNORECASE)):
        return load_image(source)
    if not allow_urls:
        raise ImageError(f"{source} is a URL; download it or, in Python, load the model with allow_urls=True")
    with needs_extra("serve", source):
        from nanovlm.processing.image_urls import fetch_image
    return load_image(fetch_image(source), name=source)


def is_data_url(url: str) -> bool:
    """Check whether a URL holds the image itself: as a data URL, or as base64 alone, which some clients send."""
    return url[:5].lower() == "data:" or BASE64.match(url) is not None


def decode_data_url(url: str, name: str) -> bytes:
    """Bytes of data:image/png;base64,... or of base64 alone; their content tells the image format."""
    head, comma, data = url.partition(",") if url[:5].lower() == "data:" else (";base64", ",", url)
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError(f"{name}: a data URL without base64; send data:image/png;base64,...")
    try:
        return base64.b64decode(data.encode().translate(None, b" \t\r\n"), validate=True)
    except ValueError as error:
        raise ImageError(f"{name}: a data URL with invalid base64: {error}") from None


def source_name(source: Any) -> str:
    """The name of a source: its path, "<stdin>", or just "image"."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    is_data = isinstance(source, (bytes, bytearray, memoryview, Image.Image))
    if not (is_data or is_array(source) or hasattr(source, "read")):
        kinds = "a path, bytes, a binary file, a PIL image, a numpy array or a tensor"
        raise TypeError(f"an image is {kinds}, not {type(source).__name__}")
    name = getattr(source, "name", None)  # a path, or for a pipe its number
    return name if isinstance(name, str) else "image"


def is_array(source: Any) -> TypeGuard[Any]:
    """True of a numpy array, of an object with its interface, and of a tensor."""
    has_interface = hasattr(source, "__array_interface__") and not isinstance(source, Image.Image)
    return is_tensor(source) or has_interface


def is_tensor(source: Any) -> TypeGuard["torch.Tensor"]:
    torch = sys.modules.get("torch")  # who finds files does not wait for its import
    return torch is not None and isinstance(source, torch.Tensor)


def from_array(array: Any) -> Image.Image:
    """An image of a numpy array (H, W) or (H, W, C), or of a tensor (H, W) or (C, H, W); C is 1, 3 or 4.

    Values are uint8, or floats in [0, 1]. Raises ImageError for others.
    """
    import torch

    try:
        values = array.detach().cpu() if is_tensor(array) else torch.as_tensor(array.copy())
    except TypeError:  # of objects or strings. The copy is there as torch takes no negative strides
        raise ImageError(f"an array of {array.dtype}; pass uint8, or floats in [0, 1]") from None
    if is_tensor(array) and values.dim() == 3:
        values = values.permute(1, 2, 0)
    if values.dim() not in (2, 3) or (values.dim() == 3 and values.size(2) not in (1, 3, 4)):
        raise ImageError(
            f"an array of shape {tuple(array.shape)}; an array is (height, width) or (height, width, channels), "
            "a tensor (height, width) or (channels, height, width), of 1, 3 or 4 channels"
        )
    if values.is_floating_point() and values.numel():
        low, high = (bound.item() for bound in values.aminmax())  # nan, if any is
        if not 0 <= low <= high <= 1:
            raise ImageError(f"an array with values from {low!r} to {high!r}; floats are in [0, 1], other values uint8")
        values = (values.float() * 255).round().to(torch.uint8)
    if values.dtype != torch.uint8:
        raise ImageError(f"an array of {array.dtype}; pass uint8, or floats in [0, 1]")
    return Image.fromarray((values.squeeze(2) if values.shape[2:] == (1,) else values).numpy())


@contextlib.contextmanager
def open_file(source: Any) -> Iterator[BinaryIO]:
    """Open a path, bytes or a binary file as a file that can seek; a pipe is read to its end."""
    if hasattr(source, "read"):
        if source.seekable():
            source.seek(0)
        source = source.read()
    with files.opened(source) if isinstance(source, (str, os.PathLike)) else io.BytesIO(source) as file:
        seekable = file if file.seekable() else io.BytesIO(file.read())
        if not seekable.read(1):
            raise ImageError("an empty file")
        yield seekable


def open_image(file: BinaryIO) -> Image.Image:
    """Image.open, which here also reads HEIC if pillow-heif is installed, and refuses NOT_IMAGES."""
    try:
        image = Image.open(file)
        if image.format in NOT_IMAGES:  # decoding it could start Ghostscript
            raise ImageError(f"{image.format} files are not read; convert this one to PNG")
        return image
    except Image.UnidentifiedImageError:
        file.seek(0)
        header = file.read(12)
        if header[4:8] != b"ftyp" or header[8:] not in HEIF_BRANDS or "HEIF" in Image.OPEN:
            raise
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        raise ImageError(f"a HEIC image; to read it: {INSTALL_HEIC}") from None
    register_heif_opener()
    file.seek(0)
    return Image.open(file)


def reason(error: Exception) -> str:
    """Why an image cannot be used, in one line."""
    text = " ".join(str(error).split())
    match error:
        case ImageError():
            return text
        case Image.UnidentifiedImageError():
            return "not an image of a known format, or a damaged one"
        case Image.DecompressionBombError():
            return f"more than {MAX_PIXELS:,} pixels; scale it down first ({text})"
        case OSError(errno=errno.EISDIR):
            return "a folder, not an image; name the images in it"
        case MemoryError():
            return "not enough memory to decode it"
        case OSError(strerror=str(system_message)):  # No such file or directory, Permission denied ...
            return system_message
    return f"cannot be decoded: {text or type(error).__name__}"


def load_rgb(image: Image.Image, max_pixels: int | None = None, side: int | None = None) -> Image.Image:
    """Decode an opened image to a new RGB image, turned as its EXIF orientation says."""
    width, height = image.size  # from the header: a decompression bomb is refused before it is decoded
    limit = min(max_pixels or MAX_PIXELS, MAX_PIXELS)
    if width < 1 or height < 1:
        raise ImageError(f"{width} x {height} is an image without pixels")
    if width * height > limit:
        raise ImageError(f"{width} x {height} is more than {limit:,} pixels; scale it down first")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageError(f"{width} x {height}: one side is more than {MAX_ASPECT_RATIO} times the other; crop it first")
    if side is not None:
        image.draft("RGB", (side, side))
    image.load()
    transposition = None
    with contextlib.suppress(Exception):  # an image with broken EXIF is still an image
        transposition = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    rgb = to_rgb(image)
    if transposition is not None:
        rgb = rgb.transpose(transposition)
    rgb.info.clear()  # or the next reader would apply the orientation again
    return rgb


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to a new RGB image, transparency composed on white."""
    if image.mode.startswith("I"):
        image = grey_from_integers(image)
    elif image.mode == "F":
        image = grey_from_floats(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":  # Pillow converts premultiplied grey to LA only
        image = image.convert("LA")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


def grey_from_integers(image: Image.Image) -> Image.Image:
    """Scale 16 bits, 0 .. 65535, to 8 (Pillow's own convert clips at 255), keeping a transparent grey level.

    A file of 32-bit integers does not name their depth. The smallest one of cameras that holds them all counts, so that
    0 .. 255 stay as they are, as in Pillow, and 12 bits are not black; a stretch to their maximum would amplify noise.
    """
    values = image.convert("I")
    is_32_bit = image.mode == "I" and image.format != "PPM"  # whose values Pillow has scaled to 16 bits
    highest = values.getextrema()[1] if is_32_bit else 65535
    white = next((2**bits - 1 for bits in (8, 10, 12, 14) if highest < 2**bits), 65535)  # type: ignore[operator]  # one band
    grey = values.point([min(255, (v * 255 + white // 2) // white) for v in range(65536)], "L")
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(values.point([0 if v == transparent else 255 for v in range(65536)], "L"))
    return grey


def grey_from_floats(image: Image.Image) -> Image.Image:
    """Scale floats to 8 bits: from 0 .. 1 or 0 .. 255 if all values lie there, else from their minimum .. maximum."""
    values = as_tensor(image).double()
    finite = values[values.isfinite()]
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
    if low >= 0 and high <= 255:
        low, high = 0.0, 1.0 if high <= 1 else 255.0
    values = (values.nan_to_num(low, high, low) - low) / (high - low or 1.0)
    return Image.frombytes("L", image.size, bytes((values * 255).round().int().flatten().tolist()))


def as_tensor(image: Image.Image) -> "torch.Tensor":
    """The values of an image, (channels, height, width): float32 of mode F, else uint8."""
    import torch

    width, height = image.size
    dtype = torch.float32 if image.mode == "F" else torch.uint8
    return torch.frombuffer(bytearray(image.tobytes()), dtype=dtype).view(height, width, -1).permute(2, 0, 1)


def augment(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    """Rotate an RGB image by up to 100 * amount degrees, move and scale it by up to amount; the size stays.

    Brightness and contrast change by up to half of amount; what becomes visible outside has its corners' mean color.
    """
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast):
        image = enhance(image).enhance(rng.uniform(1 - amount / 2, 1 + amount / 2))
    right = image.width - 1
    bottom = image.height - 1
    corners = [image.getpixel(corner) for corner in ((0, 0), (right, 0), (0, bottom), (right, bottom))]
    fill = tuple(sum(values) // 4 for values in zip(*corners))
    angle = math.radians(rng.uniform(-100 * amount, 100 * amount))
    center = [side / 2 for side in image.size]
    moved = [middle + round(rng.uniform(-amount, amount) * side) for middle, side in zip(center, image.size)]
    scale = rng.uniform(1 - amount, 1 + amount)
    matrix = []  # from a pixel of the new image to its place in the old one
    for row, middle in zip(((math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle))), center):
        x, y = (value / scale for value in row)
        matrix += [x, y, middle - x * moved[0] - y * moved[1]]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill)


def prepare_pillow() -> None:
    """Silence Pillow's warnings and log and libtiff's messages, and let a PNG hold long texts and color profiles.

    These settings belong to the process. Warnings are filtered again each time, as tests and hosts reset their filters.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").addHandler(NO_LOG)  # without any handler, logging prints warnings on standard error
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = MAX_PIXELS  # unpacked: at most as an image
    with contextlib.suppress(AttributeError, OSError):  # where Pillow does not export it
        ctypes.CDLL(Image.core.__file__).TIFFSetErrorHandler(None)
