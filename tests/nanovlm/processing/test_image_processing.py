"""Images: whatever Pillow reads becomes upright RGB or a one-line ImageError, and then tiles by nanoVLM's rule."""

import contextlib
import io
import logging
import math
import os
import random
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torchvision.transforms import functional as transforms_v1

from nanovlm.errors import ImageError, InputError
from nanovlm.processing import image_loading as images
from nanovlm.processing.image_loading import load_image
from nanovlm.processing.layouts.nanovlm import preprocess, resized_size
from support import noise_image, png


def drawn(width=48, height=32):
    """An image no turn or flip leaves as it was; smooth, so that JPEG keeps it."""
    image = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width // 2 - 1, height // 2 - 1), fill=(220, 30, 40))
    draw.rectangle((width // 2, 0, width, height // 2 - 1), fill=(30, 60, 210))
    return image


SAVE = {format: {"quality": 95} for format in ("JPEG", "AVIF")}


def encoded(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **SAVE.get(format, {}) | options)
    return file.getvalue()


def distance(one, other):
    """The mean distance of two images' values, out of 255."""
    assert one.size == other.size and one.mode == other.mode == "RGB"
    return np.abs(np.asarray(one, float) - np.asarray(other, float)).mean()


def refusal(source, *words, name=None):
    """The one line with which a source is refused; it says all the words."""
    with pytest.raises(ImageError) as caught:
        load_image(source, name)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    for word in words:
        assert word in line
    return line


# ------------------------------------------------------------------------------------------------- sources


def test_every_source_gives_the_same_pixels(tmp_path):
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
    refusal({"bytes": b"no image", "path": "c.png"}, "c.png: not an image")
    refusal({"bytes": None, "path": "c.png"}, "c.png: No such file")


@pytest.mark.parametrize("chunk", [b"zTXt", b"iTXt", b"iCCP"])
def test_a_png_may_hold_more_than_a_megabyte_of_packed_text_or_profile(chunk):
    packed = zlib.compress(b"a" * 3_000_000)
    words = {b"zTXt": b"note\0\0", b"iTXt": b"note\0\1\0\0\0", b"iCCP": b"icc\0\0"}[chunk] + packed
    data = encoded(drawn(), "PNG")
    at = data.index(b"IDAT") - 4
    piece = struct.pack(">I", len(words)) + chunk + words + struct.pack(">I", zlib.crc32(chunk + words))
    assert load_image(data[:at] + piece + data[at:]).tobytes() == drawn().tobytes()


@pytest.mark.parametrize("by_path", [True, False])
def test_pipe_is_read(by_path):
    read, write = os.pipe()
    with open(write, "wb") as sink:
        sink.write(encoded(drawn(), "PNG"))  # fits into the pipe's buffer
    with open(read, "rb") as pipe:
        assert load_image(f"/dev/fd/{read}" if by_path else pipe).tobytes() == drawn().tobytes()


def test_the_callers_image_is_not_changed():
    source = drawn().convert("RGBA")
    source.info["note"] = "mine"
    result = load_image(source)
    result.paste("black", (0, 0, 48, 32))
    assert source.mode == "RGBA" and source.info == {"note": "mine"} and source.getpixel((0, 0)) == (220, 30, 40, 255)
    same_mode = drawn()
    load_image(same_mode).paste("black", (0, 0, 48, 32))
    assert same_mode.tobytes() == drawn().tobytes()


def test_other_types_raise_type_error():
    with pytest.raises(TypeError, match="not int"):
        load_image(3)


# ------------------------------------------------------------------------------------------------------------ arrays


def test_arrays_and_tensors_are_the_image_they_hold():
    image = drawn()
    array = np.asarray(image)
    tensor = transforms_v1.pil_to_tensor(image)
    for source in (array, array / 255, (array / 255).astype("float32"), tensor, tensor / 255, tensor.bfloat16() / 255):
        assert load_image(source).tobytes() == image.tobytes() or source.dtype == torch.bfloat16
        assert load_image(source).size == (48, 32) and distance(load_image(source), image) < 1
    flipped = load_image(array[:, ::-1])  # a view with negative strides
    assert flipped.tobytes() == image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()
    requires_grad = (tensor / 255).requires_grad_()
    assert load_image(requires_grad).tobytes() == image.tobytes()


def test_arrays_may_be_grey_or_transparent():
    grey, alpha = drawn().convert("L"), drawn().convert("RGBA")
    alpha.putalpha(grey)
    for image in (grey, alpha):
        array = np.asarray(image)
        expected = load_image(image).tobytes()
        assert load_image(array).tobytes() == load_image(transforms_v1.pil_to_tensor(image)).tobytes() == expected
        assert load_image(array[..., None] if array.ndim == 2 else array).tobytes() == expected
    assert load_image(torch.from_numpy(np.array(grey))).tobytes() == load_image(grey).tobytes()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((3, 20, 30), np.uint8), "an array of shape (3, 20, 30)"),
        (np.zeros((2, 20, 30, 3), np.uint8), "an array of shape (2, 20, 30, 3)"),
        (np.full((20, 30, 3), 200.0), "values from 200 to 200; floats are in [0, 1]"),
        (torch.full((3, 20, 30), float("nan")), "values from nan to nan"),
        (np.zeros((20, 30, 3), np.int64), "an array of int64; pass uint8"),
        (np.zeros((20, 30, 3), object), "an array of object; pass uint8"),
        (np.zeros((0, 30, 3), np.uint8), "without pixels"),
    ],
    ids=str,
)
def test_other_arrays_are_refused(array, words):
    refusal(array, words)


# ----------------------------------------------------------------------------------------- formats and modes


def heic(image):
    pillow_heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    pillow_heif.from_pillow(image).save(file, quality=95)
    return file.getvalue()


def test_heic_is_read_with_pillow_heif(tmp_path, without_heif):
    (path := tmp_path / "photo.heic").write_bytes(data := heic(drawn()))
    for _ in range(2):
        assert distance(load_image(path), drawn()) < 3 and distance(load_image(data), drawn()) < 3
    assert {".heic", ".hif"} <= images.readable_extensions()
    refusal(data[:100], "not an image")


def test_heic_without_pillow_heif_names_the_extra(monkeypatch, without_heif):
    data = heic(drawn())
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    refusal(data, "a HEIC image", "pip install 'nanovlm[heic]'", name="photo.heic")


def test_readable_extensions_are_of_images_that_pillow_decodes():
    extensions = images.readable_extensions()
    assert {".jpg", ".png", ".webp", ".tga", ".ico", ".jp2", ".dds", ".qoi", ".mpo", ".psd", ".icns"} <= extensions
    assert extensions.isdisjoint({".pdf", ".eps", ".ps", ".mpg", ".h5", ".grib", ".wmf", ".txt", ".json"})


@pytest.mark.parametrize("mode", ["RGBA", "La"])
def test_transparent_image_is_composed_on_white(mode):
    image = Image.new("RGBA", (6, 4), (0, 0, 0, 255))
    image.paste((40, 40, 40, 0), (2, 0, 4, 4))  # hidden grey must not shine through
    image.paste((0, 0, 0, 128), (4, 0, 6, 4))
    result = load_image(image.convert("LA").convert("La") if mode == "La" else image)
    assert result.mode == "RGB"
    assert [result.getpixel((x, 1)) for x in (0, 2, 4)] == [(0, 0, 0), (255, 255, 255), (127, 127, 127)]


def test_transparent_palette_entries_are_composed_on_white():
    image = Image.frombytes("P", (3, 1), b"\0\1\2")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    each_alpha = encoded(image, "PNG", transparency=b"\xff\x00\x80")
    assert list(load_image(each_alpha).tobytes()) == [255, 0, 0, 255, 255, 255, 127, 127, 255]
    for format in ("PNG", "GIF"):
        one_clear = encoded(image, format, transparency=1)
        assert list(load_image(one_clear).tobytes()) == [255, 0, 0, 255, 255, 255, 0, 0, 255]


@pytest.mark.parametrize(
    ("mode", "clear", "opaque", "seen"),
    [("L", 7, 8, 8), ("RGB", (7, 7, 7), (7, 8, 7), (7, 8, 7)), ("I;16", 0x1234, 0x1235, 18), ("1", 0, 255, 255)],
)
def test_transparent_color_is_composed_on_white(mode, clear, opaque, seen):
    image = Image.new(mode, (2, 1), clear)
    image.putpixel((1, 0), opaque)
    result = load_image(encoded(image, "PNG", transparency=clear))
    assert [result.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), seen if mode == "RGB" else (seen,) * 3]


WRITTEN_MODES = [("I;16", "TIFF"), ("I;16", "PNG"), ("I;16", "PPM"), ("I;16B", "TIFF"), ("I", "TIFF"), ("I", "PPM")]


@pytest.mark.parametrize(
    ("mode", "format"), [*((mode, None) for mode in ("I;16", "I;16L", "I;16B", "I")), *WRITTEN_MODES]
)
def test_deep_grey_is_scaled_not_clipped(mode, format):
    values = [0, 255, 257, 32896, 65280, 65535]
    source = Image.frombytes(mode, (6, 1), struct.pack({"I": "=6i", "I;16B": ">6H"}.get(mode, "<6H"), *values))
    result = load_image(encoded(source, format) if format else source)
    assert [list(channel.tobytes()) for channel in result.split()] == [[0, 1, 1, 128, 254, 255]] * 3


@pytest.mark.parametrize(
    ("values", "grey"),
    [
        ([-5, 70_000, 2**31 - 1], [0, 255, 255]),  # clamped
        ([0, 7, 255], [0, 7, 255]),
        ([0, 2048, 4095], [0, 128, 255]),
        ([-5, 300, 2000], [0, 19, 125]),
    ],
)
def test_32_bit_integers_have_the_depth_that_their_values_need(values, grey):
    source = Image.frombytes("I", (3, 1), struct.pack("=3i", *values))
    for image in (source, encoded(source, "TIFF")):
        assert list(load_image(image).getchannel(0).tobytes()) == grey


@pytest.mark.parametrize("format", ["TIFF", "PNG", "PPM"])
def test_16_bits_are_scaled_the_same_however_dark(format):
    source = Image.frombytes("I;16", (3, 1), struct.pack("<3H", 0, 255, 4095))
    assert list(load_image(encoded(source, format)).getchannel(0).tobytes()) == [0, 1, 16]


@pytest.mark.parametrize(
    ("values", "grey"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]), ([0.0, 128.0, 255.0], [0, 128, 255]), ([-2.0, 0.0, 2.0], [0, 128, 255]),
        ([math.nan, 0.2, math.inf], [0, 51, 255]), ([math.nan, math.nan, -math.inf], [0, 0, 0]),
    ],
)  # fmt: skip
def test_floats_are_scaled_to_8_bits(values, grey):
    source = encoded(Image.frombytes("F", (3, 1), struct.pack("=3f", *values)), "TIFF")
    assert list(load_image(source).getchannel(2).tobytes()) == grey


@pytest.mark.parametrize("format", ["GIF", "TIFF"])
def test_first_frame_of_an_animation_is_read(format):
    frames = [Image.new("RGB", (32, 24), color) for color in ("red", "lime", "blue")]
    source = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(source)) as check:
        assert check.n_frames == 3
    assert distance(load_image(source), frames[0]) < 3


# --------------------------------------------------------------------------------------------- orientation


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
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(tmp_path, orientation, format):
    upright = drawn()
    (tmp_path / "a").write_bytes(encoded(as_stored(upright, orientation), format, exif=exif_of(orientation)))
    assert distance(load_image(tmp_path / "a"), upright) < 4
    with Image.open(tmp_path / "a") as lazy:
        once = load_image(lazy)
    assert distance(load_image(once), upright) < 4, "the orientation was applied twice"


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\0", exif_of(99).tobytes()])
@pytest.mark.filterwarnings("error")
def test_broken_exif_is_ignored(exif, capfd):
    assert distance(load_image(encoded(drawn(), "JPEG", exif=exif)), drawn()) < 4
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------ refusals


def test_what_is_no_image_is_named(tmp_path):
    assert refusal(tmp_path / "no.png") == f"{tmp_path / 'no.png'}: No such file or directory"
    (tmp_path / "a.txt").write_text("no image")
    (tmp_path / "empty.png").touch()
    stdin = io.BytesIO(b"no image")
    stdin.name = "<stdin>"
    with open(tmp_path / "a.txt", "rb") as file:
        for source, words in (
            (tmp_path, f"{tmp_path}: a folder"), ("", "'': No such file"), ("no.png", "no.png: No such file"),
            ("a\0b", "'a\\x00b': "), ("two\nlines.png", "two\\nlines.png"), ("x" * 5000, "File name too long"),
            (tmp_path / "empty.png", "empty.png: an empty file"), (b"", "image: an empty file"),
            (b"no image", "image: not an image"), (io.BytesIO(b"no image"), "image: not an image"),
            (file, f"{tmp_path / 'a.txt'}: not an image"), (stdin, "<stdin>: not an image"),
        ):  # fmt: skip
            refusal(source, words)
    refusal(b"no image", "<stdin>: not an image", name="<stdin>")
    for seed in range(20):
        refusal(random.Random(seed).randbytes(500), "not an image")
    for text in (b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"{}", b"\0" * 500, b"hello\n" * 99):
        refusal(text, "image: ")
    refusal(encoded(drawn(), "EPS"), "EPS files are not read")  # Ghostscript would run it as a program


DAMAGED = [(format, "RGB", {}) for format in ("BMP", "PNG", "TIFF", "WEBP", "JPEG2000", "JPEG", "AVIF", "GIF")]
DAMAGED += [("JPEG", "CMYK", {}), ("JPEG", "RGB", {"exif": exif_of(6)}), ("PNG", "I;16", {}), ("TIFF", "F", {})]
DAMAGED += [("TIFF", "RGB", {"compression": f"tiff_{name}"}) for name in ("lzw", "adobe_deflate", "jpeg")]


def damaged(source, rng):
    """A file with some bytes changed, lost or repeated, mostly where the headers are."""
    data = bytearray(source)
    for _ in range(rng.choice((1, 2, 8))):
        at, n = rng.randrange(min(len(data), rng.choice((60, 300, 10**6)))), rng.choice((1, 4, 64))
        match rng.randrange(4):
            case 0:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 1:
                data[at : at + n] = rng.randbytes(n)
            case 2:
                del data[at : at + min(n, len(data) - 1)]
            case 3:
                data[at:at] = data[at : at + n]
    return bytes(data)


@pytest.mark.parametrize(("format", "mode", "options"), DAMAGED)
def test_a_damaged_file_is_an_image_or_an_image_error_and_nothing_is_printed(format, mode, options, capfd):
    image = noise_image(64, 64)
    source = encoded((image.convert("L") if mode in ("I;16", "LA") else image).convert(mode), format, **options)
    for size in (1, 4, 10, 20, 40, len(source) // 4, len(source) // 2):
        refusal(source[:size], "image: ")
    sources = [source[:size] for size in (len(source) * 3 // 4, len(source) - 20, len(source) - 1)]  # may be enough
    for file in sources + [damaged(source, random.Random(seed)) for seed in range(25)]:
        with contextlib.suppress(ImageError):
            assert load_image(file).mode == "RGB"
    assert capfd.readouterr() == ("", "")


def test_pillow_logs_nothing(capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own would hide what a user sees
    source = encoded(noise_image(), "TIFF")
    three_samples = struct.pack("<HHIH", 277, 3, 1, 3)
    assert three_samples in source
    refusal(source.replace(three_samples, struct.pack("<HHIH", 277, 3, 1, 9)), "not an image")
    assert capfd.readouterr() == ("", "")


def test_more_pixels_than_the_limit_are_refused_by_the_header_whatever_pillows_own_limit_is(monkeypatch):
    assert "3600000000" in refusal(png(60_000, 60_000), "more than 178,956,970 pixels", "scale it down")
    for limit in (None, 10**9):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        refusal(png(20_000, 10_000), "20000 x 10000 is more than 178,956,970 pixels", "scale it down")
        assert limit == Image.MAX_IMAGE_PIXELS
    monkeypatch.undo()
    refusal(png(10_000, 10_000), "cannot be decoded")  # below our limit, above Pillow's warning: not called a bomb
    with pytest.raises(ImageError, match="48 x 32 is more than 1,535 pixels"):
        load_image(drawn(), max_pixels=48 * 32 - 1)


def test_empty_or_extremely_narrow_images_are_refused(tmp_path):
    for size in ((0, 0), (0, 5), (5, 0)):
        refusal(Image.new("RGB", size), f"{size[0]} x {size[1]} is an image without pixels")
    refusal(png(0, 5), "image: ")
    Image.new("RGB", (1, 5000)).save(tmp_path / "thread.png")
    refusal(tmp_path / "thread.png", "thread.png: 1 x 5000", "200 times", "crop it")
    refusal(Image.new("L", (201, 1)), "201 x 1", "200 times")
    assert load_image(Image.new("L", (200, 1))).size == (200, 1)
    assert load_image(Image.new("L", (1, 1))).size == (1, 1)


@pytest.mark.parametrize("data", [encoded(drawn(), "GIF"), encoded(drawn(), "TIFF"), b"no image", png(9, 9)])
@pytest.mark.filterwarnings("error")
def test_no_file_stays_open(tmp_path, data):
    (tmp_path / "a").write_bytes(data)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with contextlib.suppress(ImageError):
        load_image(tmp_path / "a")
    assert before == (len(os.listdir("/proc/self/fd")) if before else 0)


# ------------------------------------------------------------------------------------------ the resize rule


@pytest.mark.parametrize(
    ("size", "tile", "max_side", "to_max_side", "expected"),
    [
        ((513, 512), 512, 2048, False, (1024, 1024)),  # 512 * 1024/513 is just over one tile
        ((512, 1024), 512, 2048, False, (512, 1024)),
        ((600, 100), 512, 2048, False, (1024, 512)),
        ((4000, 3000), 512, 2048, False, (2048, 1536)),
        ((300, 100), 512, 2048, True, (2048, 1024)),  # 100 * 2048/300 = 682.7
        ((20, 4000), 512, 2048, True, (512, 2048)),
        ((364, 273), 512, 2048, True, (2048, 2048)),  # exactly 1536, but in floats a hair more: one tile more
        ((1092, 1092), 512, 2048, False, (1536, 2048)),  # the same of a square
    ],
)
def test_resized_sizes_computed_by_hand(size, tile, max_side, to_max_side, expected):
    assert resized_size(*size, tile, max_side, to_max_side) == expected


def test_without_max_side_the_image_is_one_tile():
    image, whole = noise_image(100, 60), noise_image(32, 32)
    tiles, grid = preprocess(image, tile=32)
    assert grid == (1, 1) and tiles.shape == (1, 3, 32, 32) and tiles.dtype == torch.float32
    assert torch.equal(tiles[0], transforms_v1.to_tensor(image.resize((32, 32), Image.Resampling.BILINEAR)))
    assert torch.equal(preprocess(whole, tile=32, global_view=True)[0][0], transforms_v1.to_tensor(whole))


@pytest.mark.parametrize(
    ("size", "to_max_side", "grid"),
    [
        ((30, 20), False, (1, 1)), ((60, 30), False, (1, 2)), ((30, 60), False, (2, 1)), ((64, 90), False, (3, 3)),
        ((50, 90), False, (3, 2)), ((30, 30), True, (4, 4)), ((500, 400), False, (4, 4)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("global_view", [True, False])
def test_tiles_join_to_the_resized_image(size, to_max_side, grid, global_view):
    image = noise_image(*size)
    tiles, got = preprocess(image, 32, resized_size(*size, 32, 128, to_max_side), global_view)
    rows, columns = grid
    resized = image.resize((columns * 32, rows * 32), Image.Resampling.BICUBIC)
    front = 1 if global_view and grid != (1, 1) else 0
    assert got == grid and tiles.shape == (front + rows * columns, 3, 32, 32) and tiles.is_contiguous()
    together = torch.cat(
        [torch.cat(list(tiles[front + r * columns : front + (r + 1) * columns]), dim=2) for r in range(rows)], dim=1
    )
    assert torch.equal(together, transforms_v1.to_tensor(resized))
    if front:
        assert torch.equal(tiles[0], transforms_v1.resize(transforms_v1.to_tensor(resized), [32, 32], antialias=True))
    assert tiles.min() >= 0 and tiles.max() <= 1


def test_resizing_beyond_the_pixel_limit_is_refused():
    message = "^an image of 40 x 20 would be resized to 1048576 x 524288, .* lower max_img_size in"
    with pytest.raises(InputError, match=message):
        preprocess(noise_image(40, 20), 512, resized_size(40, 20, 512, 2**20, True))


def test_preprocess_takes_rgb_only():
    with pytest.raises(ValueError, match="RGB images, not RGBA: read the image with load_image"):
        preprocess(noise_image().convert("RGBA"), tile=32)
