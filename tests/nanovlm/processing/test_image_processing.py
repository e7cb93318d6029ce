"""Images: whatever Pillow reads becomes upright RGB or a one-line ImageError, and then tiles by nanoVLM's rule."""

import contextlib
import io
import logging
import math
import os
import random
import struct
import sys
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance

from nanovlm.errors import ImageError, InputError
from nanovlm.processing import image_loading as images
from nanovlm.processing.image_loading import augment, load_image
from nanovlm.processing.layouts.nanovlm import preprocess, resized_size
from support import noise_image, png, transforms

SAVE = {format: {"quality": 95} for format in ("JPEG", "AVIF", "HEIF")}


def drawn(width=48, height=32):
    """An image no turn or flip leaves as it was; smooth, so that JPEG keeps it."""
    image = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width // 2 - 1, height // 2 - 1), fill=(220, 30, 40))
    draw.rectangle((width // 2, 0, width, height // 2 - 1), fill=(30, 60, 210))
    return image


def encoded(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **SAVE.get(format, {}) | options)
    return file.getvalue()


def packed(mode, code, *values):
    return Image.frombytes(mode, (len(values), 1), struct.pack(f"{code[0]}{len(values)}{code[1]}", *values))


def greys(source):
    return [list(channel.tobytes()) for channel in load_image(source).split()]


def distance(one, other):
    assert one.size == other.size and one.mode == other.mode == "RGB"
    return np.abs(np.asarray(one, float) - np.asarray(other, float)).mean()


def refusal(source, *words, name=None):
    """The one line with which a source is refused; it says all the words."""
    with pytest.raises(ImageError) as caught:
        load_image(source, name)
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and all(word in line for word in words), line


def test_every_source_gives_the_same_pixels_and_none_is_changed(tmp_path):
    drawn().save(path := tmp_path / "a.png")
    data = path.read_bytes()
    (at_its_end := io.BytesIO(data)).read()
    in_a_row = [{"bytes": data, "path": "b.png"}, {"bytes": None, "path": str(path)}, {"bytes": data}]
    with open(path, "rb") as file, Image.open(path) as lazy:
        sources = [path, str(path), data, bytearray(data), memoryview(data), at_its_end, file, lazy, drawn(), *in_a_row]
        for source in sources * 2:
            image = load_image(source)
            assert image.mode == "RGB" and image.tobytes() == drawn().tobytes()
        assert not file.closed  # it belongs to who opened it
    read, write = os.pipe()
    with open(write, "wb") as sink:
        sink.write(data)  # fits into the pipe's buffer
    with open(read, "rb") as pipe:
        assert load_image(pipe).tobytes() == drawn().tobytes()
    with pytest.raises(TypeError, match="not int"):
        load_image(3)
    for mode in ("RGBA", "RGB"):
        source = drawn().convert(mode)
        source.info["note"] = "mine"
        load_image(source).paste("black", (0, 0, 48, 32))
        assert source.info == {"note": "mine"} and source.tobytes() == drawn().convert(mode).tobytes()


def test_arrays_and_tensors_are_the_image_they_hold():
    image = drawn()
    array, tensor = np.asarray(image), transforms.functional.pil_to_tensor(image)
    requires_grad = (tensor / 255).requires_grad_()
    for source in (array, array / 255, (array / 255).astype("float32"), tensor, tensor / 255, requires_grad):
        assert load_image(source).tobytes() == image.tobytes()
    assert distance(load_image(tensor.bfloat16() / 255), image) < 1
    flipped = load_image(array[:, ::-1])  # a view with negative strides
    assert flipped.tobytes() == image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()
    grey, alpha = drawn().convert("L"), drawn().convert("RGBA")
    alpha.putalpha(grey)
    for image in (grey, alpha):
        array, tensor = np.array(image), transforms.functional.pil_to_tensor(image)
        same = [array, tensor, *((array[..., None], torch.from_numpy(array)) if image is grey else ())]
        assert {load_image(source).tobytes() for source in same} == {load_image(image).tobytes()}


def test_a_png_may_hold_more_than_a_megabyte_of_packed_text_or_profile():
    content, data = zlib.compress(b"a" * 3_000_000), encoded(drawn(), "PNG")
    at = data.index(b"IDAT") - 4
    for head in (b"zTXtnote\0\0", b"iTXtnote\0\1\0\0\0", b"iCCPicc\0\0"):
        chunk = head + content
        piece = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        assert load_image(data[:at] + piece + data[at:]).tobytes() == drawn().tobytes()


def test_heic_is_read_with_pillow_heif(monkeypatch, without_heif):
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(drawn()).save(file := io.BytesIO(), quality=95)
    data = file.getvalue()
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "pillow_heif", None)
        refusal(data, "photo.heic: a HEIC image", "pip install 'nanovlm[heic]'", name="photo.heic")
    for _ in range(2):
        assert distance(load_image(data), drawn()) < 3
    refusal(data[:100], "not an image")
    assert {".heic", ".hif"} <= images.readable_extensions()


def test_readable_extensions_are_of_images_that_pillow_decodes():
    extensions = images.readable_extensions()
    assert {".jpg", ".png", ".webp", ".tga", ".ico", ".jp2", ".dds", ".qoi", ".mpo", ".psd", ".icns"} <= extensions
    assert extensions.isdisjoint([".pdf", ".eps", ".ps", ".mpg", ".h5", ".grib", ".wmf", ".txt", ".json"])


def test_transparent_pixels_palette_entries_and_colors_are_composed_on_white():
    image = Image.new("RGBA", (6, 4), (0, 0, 0, 255))
    image.paste((40, 40, 40, 0), (2, 0, 4, 4))  # hidden grey must not shine through
    image.paste((0, 0, 0, 128), (4, 0, 6, 4))
    for source in (image, image.convert("LA").convert("La")):
        pixels = [load_image(source).getpixel((x, 1)) for x in (0, 2, 4)]
        assert pixels == [(0, 0, 0), (255, 255, 255), (127, 127, 127)]
    palette = Image.frombytes("P", (3, 1), b"\0\1\2")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    each_alpha = encoded(palette, "PNG", transparency=b"\xff\x00\x80")
    assert list(load_image(each_alpha).tobytes()) == [255, 0, 0, 255, 255, 255, 127, 127, 255]
    for format in ("PNG", "GIF"):
        one_clear = encoded(palette, format, transparency=1)
        assert list(load_image(one_clear).tobytes()) == [255, 0, 0, 255, 255, 255, 0, 0, 255]
    colors = [("L", 7, 8, 8), ("RGB", (7, 7, 7), (7, 8, 7), 7), ("I;16", 0x1234, 0x1235, 18), ("1", 0, 255, 255)]
    for mode, clear, opaque, red in colors:
        image = Image.new(mode, (2, 1), clear)
        image.putpixel((1, 0), opaque)
        assert greys(encoded(image, "PNG", transparency=clear))[0] == [255, red]


DEEP = [0, 255, 257, 32896, 65280, 65535]
DEEP_GREY = [0, 1, 1, 128, 254, 255]
GREYS = [  # mode, layout of struct, values, what is seen, formats (None: the image itself)
    ("I;16", "<H", DEEP, DEEP_GREY, (None, "TIFF", "PNG", "PPM")), ("I;16L", "<H", DEEP, DEEP_GREY, (None,)),
    ("I;16B", ">H", DEEP, DEEP_GREY, (None, "TIFF")), ("I", "=i", DEEP, DEEP_GREY, (None, "TIFF", "PPM")),
    ("I;16", "<H", [0, 255, 4095], [0, 1, 16], ("TIFF", "PNG", "PPM")),  # the same, however dark
    ("I", "=i", [-5, 70_000, 2**31 - 1], [0, 255, 255], (None, "TIFF")),  # the depth that the values need; clamped
    ("I", "=i", [0, 7, 255], [0, 7, 255], (None, "TIFF")), ("I", "=i", [0, 2048, 4095], [0, 128, 255], (None, "TIFF")),
    ("I", "=i", [-5, 300, 2000], [0, 19, 125], (None, "TIFF")),
    ("F", "=f", [0.0, 0.5, 1.0], [0, 128, 255], ("TIFF",)), ("F", "=f", [0.0, 128.0, 255.0], [0, 128, 255], ("TIFF",)),
    ("F", "=f", [-2.0, 0.0, 2.0], [0, 128, 255], ("TIFF",)), ("F", "=f", [math.nan] * 3, [0, 0, 0], ("TIFF",)),
    ("F", "=f", [math.nan, 0.2, math.inf], [0, 51, 255], (None,)),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "code", "values", "grey", "formats"), GREYS)
def test_deep_grey_is_scaled_not_clipped(mode, code, values, grey, formats):
    source = packed(mode, code, *values)
    for format in formats:
        assert greys(encoded(source, format) if format else source) == [grey] * 3


def test_first_frame_of_an_animation_is_read():
    frames = [Image.new("RGB", (32, 24), color) for color in ("red", "lime", "blue")]
    for format in ("GIF", "TIFF"):
        source = encoded(frames[0], format, save_all=True, append_images=frames[1:])
        assert Image.open(io.BytesIO(source)).n_frames == 3 and distance(load_image(source), frames[0]) < 3


def as_stored(upright, orientation):
    """The pixels that a turned camera stores, from the EXIF standard's table."""
    image = np.asarray(upright)
    turned = image.transpose(1, 0, 2)  # the 0th row is the visual left side
    stored = [image, image[:, ::-1], image[::-1, ::-1], image[::-1]]
    stored += [turned, turned[::-1], turned[::-1, ::-1], turned[:, ::-1]]
    return Image.fromarray(np.ascontiguousarray(stored[orientation - 1]))


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_exif_orientation_is_applied_once(format):
    for orientation in range(1, 9):
        data = encoded(as_stored(drawn(), orientation), format, exif=exif_of(orientation))
        once = load_image(Image.open(io.BytesIO(data)))
        assert distance(load_image(data), drawn()) < 4
        assert distance(load_image(once), drawn()) < 4, "the orientation was applied twice"


@pytest.mark.filterwarnings("error::UserWarning")
def test_broken_exif_and_what_pillow_logs_are_not_printed(capfd, monkeypatch):
    for exif in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\0", exif_of(99).tobytes()):
        assert distance(load_image(encoded(drawn(), "JPEG", exif=exif)), drawn()) < 4
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own would hide what a user sees
    source, samples = encoded(noise_image(), "TIFF"), [struct.pack("<HHIH", 277, 3, 1, n) for n in (3, 9)]
    assert samples[0] in source
    refusal(source.replace(*samples), "not an image")
    assert capfd.readouterr() == ("", "")


def test_what_is_no_image_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("no image")
    (tmp_path / "empty.png").touch()
    Image.new("RGB", (1, 5000)).save(tmp_path / "thread.png")
    os.mkfifo(tmp_path / "pipe.png")
    stdin = io.BytesIO(b"no image")
    stdin.name = "<stdin>"
    with open(tmp_path / "a.txt", "rb") as file:
        for source, *words in (
            (tmp_path / "no.png", f"{tmp_path / 'no.png'}: No such file or directory"), ("", "'': No such file"),
            (tmp_path, f"{tmp_path}: a folder, not an image"), ("/dev/zero", "a pipe or a device"),
            (tmp_path / "pipe.png", "a pipe or a device, not a file"), ("no.png", "no.png: No such file"),
            ("a\0b", "'a\\x00b': "), ("two\nlines.png", "two\\nlines.png"), ("x" * 5000, "File name too long"),
            (tmp_path / "empty.png", "empty.png: an empty file"), (b"", "image: an empty file"),
            (b"no image", "image: not an image"), (io.BytesIO(b"no image"), "image: not an image"),
            (file, f"{tmp_path / 'a.txt'}: not an image"), (stdin, "<stdin>: not an image"),
            ({"bytes": b"no image", "path": "c.png"}, "c.png: not an image"),
            ({"bytes": None, "path": "c.png"}, "c.png: No such file"),
            (encoded(drawn(), "EPS"), "EPS files are not read"),  # Ghostscript would run it as a program
            (Image.new("RGB", (0, 5)), "0 x 5 is an image without pixels"), (png(0, 5), "image: "),
            (tmp_path / "thread.png", "thread.png: 1 x 5000", "200 times", "crop it"),
            (Image.new("L", (201, 1)), "201 x 1", "200 times"),
            (np.zeros((3, 20, 30), np.uint8), "an array of shape (3, 20, 30)"),
            (np.zeros((2, 20, 30, 3), np.uint8), "an array of shape (2, 20, 30, 3)"),
            (np.zeros((0, 30, 3), np.uint8), "without pixels"),
            *((np.zeros((20, 30, 3), kind), f"an array of {kind}; pass uint8") for kind in ("int64", "object")),
            (np.full((20, 30, 3), 200.0), "values from 200.0 to 200.0; floats are in [0, 1]"),
            (np.full((20, 30, 3), 1 + 1e-9), "values from 1.000000001 to 1.000000001"),
            (torch.full((3, 20, 30), math.nan), "values from nan to nan"),
            (torch.full((3, 20, 30), 1.0000001), "values from 1.0000001192092896 to 1.0000001192092896"),
            *((random.Random(seed).randbytes(500), "not an image") for seed in range(20)),
            *((text, "image: ") for text in (b"<svg xmlns=''/>", b"%PDF-1.7", b"{}", b"\0" * 500, b"hello\n" * 99)),
        ):  # fmt: skip
            refusal(source, *words)
    refusal(b"no image", "<stdin>: not an image", name="<stdin>")
    assert load_image(Image.new("L", (200, 1))).size == (200, 1)


DAMAGED = [(format, "RGB", {}) for format in ("BMP", "PNG", "TIFF", "WEBP", "JPEG2000", "JPEG", "AVIF", "GIF")]
DAMAGED += [("JPEG", "CMYK", {}), ("JPEG", "RGB", {"exif": exif_of(6)}), ("PNG", "I;16", {}), ("TIFF", "F", {})]
DAMAGED += [("TIFF", "RGB", {"compression": f"tiff_{name}"}) for name in ("lzw", "adobe_deflate", "jpeg")]


def damaged(source, rng):
    """A file with some bytes changed, lost or repeated, mostly where the headers are."""
    data = bytearray(source)
    for _ in range(rng.choice((1, 2, 8))):
        at, n = rng.randrange(min(len(data), rng.choice((60, 300, 10**6)))), rng.choice((1, 4, 64))
        data[at : at + rng.choice((0, n))] = rng.choice((rng.randbytes(n), b"", data[at : at + n], b"\xff" * n))
    return bytes(data)


@pytest.mark.parametrize(("format", "mode", "options"), DAMAGED)
def test_a_damaged_file_is_an_image_or_an_image_error_and_nothing_is_printed(format, mode, options, capfd):
    image = noise_image(64, 64)
    source = encoded((image.convert("L") if mode == "I;16" else image).convert(mode), format, **options)
    for size in (1, 4, 10, 20, 40, len(source) // 4, len(source) // 2):
        refusal(source[:size], "image: ")
    sources = [source[:size] for size in (len(source) * 3 // 4, len(source) - 20, len(source) - 1)]  # may be enough
    for file in sources + [damaged(source, random.Random(seed)) for seed in range(25)]:
        with contextlib.suppress(ImageError):
            assert load_image(file).mode == "RGB"
    assert capfd.readouterr() == ("", "")


def test_more_pixels_than_the_limit_are_refused_by_the_header_whatever_pillows_own_limit_is(monkeypatch):
    refusal(png(60_000, 60_000), "more than 178,956,970 pixels", "scale it down", "3600000000")
    for limit in (None, 10**9):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        refusal(png(20_000, 10_000), "20000 x 10000 is more than 178,956,970 pixels", "scale it down")
    monkeypatch.undo()
    refusal(png(10_000, 10_000), "cannot be decoded")  # below our limit, above Pillow's warning: not called a bomb
    with pytest.raises(ImageError, match="48 x 32 is more than 1,535 pixels"):
        load_image(drawn(), max_pixels=48 * 32 - 1)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are listed on Linux")
def test_no_file_stays_open(tmp_path):
    for data in (encoded(drawn(), "GIF"), encoded(drawn(), "TIFF"), b"no image", png(9, 9)):
        (tmp_path / "a").write_bytes(data)
        with warnings.catch_warnings(record=True) as caught, contextlib.suppress(ImageError):
            warnings.simplefilter("always", ResourceWarning)
            load_image(tmp_path / "a")
        links = {os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd")}
        unclosed = [one for one in caught if str(tmp_path) in str(one.message)]  # not what earlier tests left open
        assert not unclosed and os.path.realpath(tmp_path / "a") not in links


RESIZED = [  # size, to the longest side, size expected of tiles of 512 and at most 2,048
    ((513, 512), False, (1024, 1024)),  # 512 * 1024/513 is just over one tile
    ((512, 1024), False, (512, 1024)), ((600, 100), False, (1024, 512)), ((4000, 3000), False, (2048, 1536)),
    ((364, 273), True, (2048, 2048)),  # exactly 1536, but in floats a hair more: one tile more
    ((1092, 1092), False, (1536, 2048)),  # a square, by the same rounding
]  # fmt: skip


def test_resized_sizes_computed_by_hand_and_wrong_use():
    for size, to_max_side, expected in RESIZED:
        assert resized_size(*size, 512, 2048, to_max_side) == expected
    message = "^an image of 40 x 20 would be resized to 1048576 x 524288, .* lower max_img_size in"
    with pytest.raises(InputError, match=message):
        preprocess(noise_image(40, 20), 512, resized_size(40, 20, 512, 2**20, True))
    with pytest.raises(ValueError, match="RGB images, not RGBA: read the image with load_image"):
        preprocess(noise_image().convert("RGBA"), tile=32)


GRIDS = [  # size, to the longest side, grid; None: without a size in tiles an image becomes one tile, bilinearly
    ((30, 20), False, (1, 1)), ((60, 30), False, (1, 2)), ((30, 60), False, (2, 1)), ((64, 90), False, (3, 3)),
    ((50, 90), False, (3, 2)), ((30, 30), True, (4, 4)), ((500, 400), False, (4, 4)), ((100, 60), None, (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("size", "to_max_side", "grid"), GRIDS)
@pytest.mark.parametrize("global_view", [True, False])
def test_tiles_join_to_the_resized_image(size, to_max_side, grid, global_view):
    image = noise_image(*size)
    in_tiles = None if to_max_side is None else resized_size(*size, 32, 128, to_max_side)
    tiles, got = preprocess(image, 32, in_tiles, global_view)
    rows, columns = grid
    how = Image.Resampling.BICUBIC if in_tiles else Image.Resampling.BILINEAR
    resized = transforms.functional.to_tensor(image.resize((columns * 32, rows * 32), how))
    front = 1 if global_view and grid != (1, 1) else 0
    assert got == grid and tiles.shape == (front + rows * columns, 3, 32, 32) and tiles.is_contiguous()
    lines = [torch.cat(list(tiles[front + r * columns :][:columns]), dim=2) for r in range(rows)]
    assert torch.equal(torch.cat(lines, dim=1), resized)
    if front:
        assert torch.equal(tiles[0], transforms.functional.resize(resized, [32, 32], antialias=True))


@pytest.mark.parametrize("size", [*((40 + seed, 30) for seed in range(8)), (1, 1), (1000, 7)])
def test_an_augmented_image_is_that_of_torchvision(size):
    """torchvision's affine, with the same random numbers, before the mean of the corners."""
    image, rng, amount = noise_image(*size), random.Random(size[0]), 0.15
    result = augment(image, amount, random.Random(size[0]))
    assert augment(image, 0.0, random.Random(0)).tobytes() == image.tobytes()
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast):
        image = enhance(image).enhance(rng.uniform(1 - amount / 2, 1 + amount / 2))
    corners = [image.getpixel((x, y)) for x in (0, image.width - 1) for y in (0, image.height - 1)]
    angle = rng.uniform(-100 * amount, 100 * amount)
    moved = [round(rng.uniform(-amount, amount) * side) for side in image.size]
    options = {"interpolation": transforms.InterpolationMode.BILINEAR, "fill": [sum(v) // 4 for v in zip(*corners)]}
    scale = rng.uniform(1 - amount, 1 + amount)
    expected = transforms.functional.affine(image, angle, moved, scale, [0.0, 0.0], **options)
    assert result.tobytes() == expected.tobytes()
