"""The image of a scene: a background mixed from two muted tones, and antialiased shapes on it."""

import math
from collections.abc import Sequence
from random import Random

from PIL import Image, ImageChops, ImageDraw

from nanovlm.errors import InputError
from nanovlm.synthetic.scene import RGB, Scene, Shape

Point = tuple[float, float]

# Bright and dim tone; every mixture of the two stays far from the color of every shape.
TONES = (
    ((244, 244, 241), (184, 188, 192)),
    ((228, 240, 250), (168, 190, 208)),
    ((230, 244, 228), (176, 200, 178)),
    ((248, 240, 226), (206, 194, 176)),
    ((240, 236, 250), (190, 186, 212)),
    ((72, 74, 78), (18, 19, 22)),
    ((56, 70, 92), (12, 18, 32)),
    ((54, 76, 72), (10, 24, 22)),
)
_SUPERSAMPLING = 3  # patterns and shapes are drawn this many times larger, then averaged


def draw(scene: Scene, width: int = 192, height: int = 192) -> Image.Image:
    """The scene as an RGB image of width x height pixels; it looks the same at every size. InputError below 16."""
    if min(width, height) < 16:
        raise InputError(f"an image of {width}x{height} pixels is too small to draw on: use at least 16 x 16")
    rng = Random(scene.seed)
    bright, dim = (tuple(c + rng.randint(-4, 4) for c in tone) for tone in rng.choice(TONES))
    image = Image.new("RGB", (width, height), bright)
    image.paste(dim, mask=_mask(scene.background, rng, width, height))
    for shape in scene.shapes:
        _draw_shape(image, shape, rng)
    return image


# Outlines: points around (0, 0) at a distance of up to about 1; y points down.


def _star(n: int, *radii: float) -> list[Point]:
    """n points around the center from the top, clockwise, their distances cycling through radii."""
    turn = 2 * math.pi / n
    return [(radii[i % len(radii)] * math.sin(i * turn), -radii[i % len(radii)] * math.cos(i * turn)) for i in range(n)]


def _heart(t: float) -> Point:
    y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
    return 0.98 * math.sin(t) ** 3, -y / 16 - 0.1


_ARM = 0.33  # half the width of the cross's arms
_OUTLINES: dict[str, list[Point]] = {
    "circle": _star(64, 0.94),
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "triangle": [(0, -0.95), (0.9, 0.7), (-0.9, 0.7)],
    "diamond": [(0, -1), (0.8, 0), (0, 1), (-0.8, 0)],
    "star": _star(10, 1.04, 0.44),
    "heart": [_heart(2 * math.pi * i / 48) for i in range(48)],
    "cross": [(-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM)]
    + [(_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM)],
    "ring": _star(64, 0.98),
}
_RING_HOLE = _star(64, 0.55)


def _draw_shape(image: Image.Image, shape: Shape, rng: Random) -> None:
    """Paint one shape, flat, outlined or softly shaded."""
    style = rng.choice(("flat", "flat", "outlined", "shaded"))
    shading = rng.choice(_DIRECTIONS)
    radius = shape.radius * min(image.size)
    x, y = shape.x * image.width, shape.y * image.height
    left, top = math.floor(x - 1.1 * radius) - 1, math.floor(y - 1.1 * radius) - 1
    side = math.ceil(2.2 * radius) + 3  # of a canvas for this shape
    cos, sin = math.cos(math.radians(shape.angle)), math.sin(math.radians(shape.angle))

    def to_canvas(points: Sequence[Point]) -> list[Point]:
        scale = _SUPERSAMPLING
        return [
            (scale * (x - left + radius * (cos * u - sin * v)), scale * (y - top + radius * (sin * u + cos * v)))
            for u, v in points
        ]

    inside, canvas = _canvas(side, side)
    canvas.polygon(to_canvas(_OUTLINES[shape.kind]), fill=255)
    if shape.kind == "ring":
        canvas.polygon(to_canvas(_RING_HOLE), fill=0)
    inside = inside.reduce(_SUPERSAMPLING)
    image.paste(shape.rgb, (left, top), inside)
    if style == "outlined":
        edge, canvas = _canvas(side, side)
        width = max(1, round(_SUPERSAMPLING * radius * 0.09))
        canvas.polygon(to_canvas(_OUTLINES[shape.kind]), outline=255, width=width)
        image.paste(_darker(shape.rgb, 0.6), (left, top), edge.reduce(_SUPERSAMPLING))
    elif style == "shaded":
        shade = ImageChops.multiply(inside, _blend(shading, side, side))
        image.paste(_darker(shape.rgb, 0.87), (left, top), shade)


def _darker(rgb: RGB, factor: float) -> RGB:
    red, green, blue = (round(c * factor) for c in rgb)
    return red, green, blue


# Backgrounds: masks, 0 where the bright tone shows and 255 where the dim one does.

Corners = tuple[int, int, int, int]  # values at the top left, top right, bottom left, bottom right
_GRADIENTS: list[Corners] = [(0, 0, 255, 255), (0, 255, 0, 255), (0, 128, 128, 255), (128, 0, 255, 128)]
_DIRECTIONS: list[Corners] = [direction for (a, b, c, d) in _GRADIENTS for direction in ((a, b, c, d), (d, c, b, a))]


def _blend(corners: Corners, width: int, height: int) -> Image.Image:
    """An even blend of the values at four corners."""
    return Image.frombytes("L", (2, 2), bytes(corners)).resize(
        (width, height), Image.Resampling.BILINEAR, (0.5, 0.5, 1.5, 1.5)
    )


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    mask = Image.new("L", (_SUPERSAMPLING * width, _SUPERSAMPLING * height))
    return mask, ImageDraw.Draw(mask)


def _mask(background: str, rng: Random, width: int, height: int) -> Image.Image:
    if background in _SOFT:
        return _SOFT[background](rng, width, height)
    mask, canvas = _canvas(width, height)
    _SHARP[background](rng, canvas, *mask.size)
    return mask.reduce(_SUPERSAMPLING)


def _plain(rng: Random, width: int, height: int) -> Image.Image:
    return Image.new("L", (width, height), rng.choice((0, 255)))


def _gradient(rng: Random, width: int, height: int) -> Image.Image:
    return _blend(rng.choice(_DIRECTIONS), width, height)


def _glowing(rng: Random, width: int, height: int) -> Image.Image:
    left, top = rng.uniform(20, 76), rng.uniform(20, 76)  # the glow may be off center
    glow = Image.radial_gradient("L").point([min(255, round(1.6 * v)) for v in range(256)])
    return glow.resize((width, height), Image.Resampling.BILINEAR, (left, top, left + 160, top + 160))


def _random_grid(rng: Random, width: int, height: int, across: int) -> Image.Image:
    """A random grid with `across` values along the shorter side, whatever the size in pixels."""
    columns, rows = (round(across * side / min(width, height)) for side in (width, height))
    return Image.frombytes("L", (columns, rows), rng.randbytes(columns * rows))


def _noisy(rng: Random, width: int, height: int) -> Image.Image:
    grains = _random_grid(rng, width, height, 64).point([min(255, max(0, 128 + 3 * (v - 128))) for v in range(256)])
    return grains.resize((width, height), Image.Resampling.BILINEAR)


def _cloudy(rng: Random, width: int, height: int) -> Image.Image:
    return _random_grid(rng, width, height, 5).resize((width, height), Image.Resampling.BICUBIC)


def _striped(rng: Random, canvas: ImageDraw.ImageDraw, width: int, height: int) -> None:
    step = rng.uniform(0.13, 0.19) * min(width, height)
    angle = rng.choice((0, 45, 90, 135))
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    far = width + height
    offset = rng.random()
    for i in range(-math.ceil(far / step), math.ceil(far / step)):
        u, v = (i + offset) * step, (i + offset + 0.5) * step
        corners = ((u, -far), (v, -far), (v, far), (u, far))
        canvas.polygon([(cos * p - sin * q, sin * p + cos * q) for p, q in corners], fill=255)


def _wavy(rng: Random, canvas: ImageDraw.ImageDraw, width: int, height: int) -> None:
    short = min(width, height)
    step, swing, wave = (rng.uniform(*span) * short for span in ((0.14, 0.18), (0.035, 0.045), (0.26, 0.36)))
    phase, offset, upright = rng.uniform(0, 2 * math.pi), rng.random(), rng.random() < 0.5
    along, aside = (height, width) if upright else (width, height)
    xs = [i * wave / 16 for i in range(math.ceil(16 * along / wave) + 2)]
    for i in range(-2, math.ceil(aside / step) + 1):
        upper = [(x, (i + offset) * step + swing * math.sin(2 * math.pi * x / wave + phase)) for x in xs]
        band = upper + [(x, y + step / 2) for x, y in reversed(upper)]
        canvas.polygon([(y, x) for x, y in band] if upright else band, fill=255)


def _cells(
    rng: Random, width: int, height: int, low: float, high: float
) -> tuple[float, list[tuple[int, int, float, float]]]:
    """A square lattice over everything: its step, and (column, row, x, y) of each cell's corner."""
    step = rng.uniform(low, high) * min(width, height)
    left, top = -step * rng.random(), -step * rng.random()
    columns, rows = math.ceil(width / step) + 1, math.ceil(height / step) + 1
    return step, [(i, j, left + i * step, top + j * step) for j in range(rows) for i in range(columns)]


def _checkered(rng: Random, canvas: ImageDraw.ImageDraw, width: int, height: int) -> None:
    step, cells = _cells(rng, width, height, 0.09, 0.125)
    for i, j, x, y in cells:
        if (i + j) % 2:
            canvas.rectangle((x, y, x + step, y + step), fill=255)


def _dotted(rng: Random, canvas: ImageDraw.ImageDraw, width: int, height: int) -> None:
    step, cells = _cells(rng, width, height, 0.10, 0.13)
    for _, _, x, y in cells:
        canvas.ellipse((x, y, x + 0.42 * step, y + 0.42 * step), fill=255)


def _gridded(rng: Random, canvas: ImageDraw.ImageDraw, width: int, height: int) -> None:
    step, cells = _cells(rng, width, height, 0.11, 0.15)
    line = 0.02 * min(width, height)
    for _, _, x, y in cells:
        canvas.rectangle((x, y, x + step, y + line), fill=255)
        canvas.rectangle((x, y, x + line, y + step), fill=255)


_SOFT = {"plain": _plain, "gradient": _gradient, "glowing": _glowing, "noisy": _noisy, "cloudy": _cloudy}
_SHARP = {"striped": _striped, "wavy": _wavy, "checkered": _checkered, "dotted": _dotted, "gridded": _gridded}
