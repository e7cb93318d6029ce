"""The image of a scene: a background mixed from two muted tones, and antialiased shapes on it."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from PIL import Image, ImageChops, ImageDraw

from nanovlm.errors import InputError
from nanovlm.synthetic.scene import Scene, Shape

Point = tuple[float, float]
Canvas = ImageDraw.ImageDraw

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
SUPERSAMPLING = 3  # patterns and shapes are drawn this many times larger, then averaged


def draw(scene: Scene, width: int = 192, height: int = 192, varied: bool = True) -> Image.Image:
    """The scene as an RGB image of width x height pixels; it looks the same at every size. InputError below 16.

    Without `varied`, patterns are always dim on bright, dots in straight rows, and hearts deeply notched.
    """
    if min(width, height) < 16:
        raise InputError(f"an image of {width}x{height} pixels is too small to draw on; use at least 16 x 16")
    rng = Random(scene.seed)
    bright, dim = (tuple(c + rng.randint(-8, 8) for c in tone) for tone in rng.choice(TONES))
    background = scene.background
    if varied and background != "glowing" and rng.random() < 0.5:  # what glows is bright in the middle
        bright, dim = dim, bright
    if varied and background == "dotted" and rng.random() < 0.5:
        background = "staggered"
    image = Image.new("RGB", (width, height), bright)
    if background in SOFT:
        mask = SOFT[background](rng, width, height)
    else:
        mask, canvas = _canvas(width, height)
        SHARP[background](rng, canvas, *mask.size)
        mask = mask.reduce(SUPERSAMPLING)
    image.paste(dim, mask=mask)
    for shape in scene.shapes:
        _draw_shape(image, shape, rng, varied)
    return image


def _canvas(width: int, height: int) -> tuple[Image.Image, Canvas]:
    mask = Image.new("L", (SUPERSAMPLING * width, SUPERSAMPLING * height))
    return mask, ImageDraw.Draw(mask)


def _draw_shape(image: Image.Image, shape: Shape, rng: Random, varied: bool) -> None:
    """Paint one shape, flat, outlined or softly shaded."""
    style = rng.choice(("flat", "flat", "outlined", "shaded"))
    shading = rng.choice(DIRECTIONS)
    kind = "full heart" if varied and shape.kind == "heart" and rng.random() < 0.5 else shape.kind
    outline = OUTLINES[kind](rng)
    radius = shape.radius * min(image.size)
    x, y = shape.x * image.width, shape.y * image.height
    left, top = math.floor(x - 1.1 * radius) - 1, math.floor(y - 1.1 * radius) - 1
    side = math.ceil(2.2 * radius) + 3  # of a canvas for this shape
    cos, sin = math.cos(math.radians(shape.angle)), math.sin(math.radians(shape.angle))

    def to_canvas(points: Sequence[Point]) -> list[Point]:
        turned = [(cos * u - sin * v, sin * u + cos * v) for u, v in points]
        return [(SUPERSAMPLING * (x - left + radius * u), SUPERSAMPLING * (y - top + radius * v)) for u, v in turned]

    def paint(mask: Image.Image, brightness: float) -> None:
        image.paste(tuple(round(c * brightness) for c in shape.rgb), (left, top), mask)

    inside, canvas = _canvas(side, side)
    canvas.polygon(to_canvas(outline), fill=255)
    if shape.kind == "ring":
        canvas.polygon(to_canvas(_star(64, rng.uniform(0.4, 0.8))), fill=0)
    inside = inside.reduce(SUPERSAMPLING)
    paint(inside, 1)
    if style == "outlined":
        edge, canvas = _canvas(side, side)
        canvas.polygon(to_canvas(outline), outline=255, width=max(1, round(SUPERSAMPLING * radius * 0.09)))
        paint(edge.reduce(SUPERSAMPLING), 0.6)
    elif style == "shaded":
        paint(ImageChops.multiply(inside, _blend(shading, side, side)), 0.87)


# Outlines: points around (0, 0) at a distance of up to about 1; y points down. Their proportions vary from shape to
# shape, so that a model learns what a cross is and not what this file's cross looks like.


def _star(n: int, *radii: float) -> list[Point]:
    """n points around the center from the top, clockwise, their distances cycling through radii."""
    turn = 2 * math.pi / n
    return [(radii[i % len(radii)] * math.sin(i * turn), -radii[i % len(radii)] * math.cos(i * turn)) for i in range(n)]


def _square(rng: Random) -> list[Point]:
    """A superellipse (Lame curve): sharp or with rounded corners."""
    half = rng.uniform(0.72, 0.88)
    exponent = 2 / rng.choice((6, 10, 20, 100))

    def bent(v: float) -> float:
        return half * math.copysign(abs(v) ** exponent, v)

    angles = [2 * math.pi * i / 64 for i in range(64)]
    return [(bent(math.sin(t)), bent(-math.cos(t))) for t in angles]


def _triangle(rng: Random) -> list[Point]:
    top = rng.uniform(0.85, 1)
    bottom = rng.uniform(0.5, 0.8)
    half = rng.uniform(0.72, 1)
    return [(0, -top), (half, bottom), (-half, bottom)]


def _diamond(rng: Random) -> list[Point]:
    half = rng.uniform(0.55, 1)
    return [(0, -1), (half, 0), (0, 1), (-half, 0)]


def _heart(rng: Random) -> list[Point]:
    """A curve of sines and cosines, or two arcs that meet in a notch and run straight to the tip."""
    width, height = rng.uniform(0.85, 1.05), rng.uniform(0.88, 1.08)
    if rng.random() < 0.5:
        angles = [2 * math.pi * i / 48 for i in range(48)]
        heights = [13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t) for t in angles]
        points = [(0.98 * math.sin(t) ** 3, -height / 16 - 0.1) for t, height in zip(angles, heights)]
    else:  # arcs around (center, -top) and its mirror image, and the tangents from them to (0, tip)
        center = rng.uniform(0.42, 0.5)
        radius = center * rng.uniform(1.03, 1.15)
        top, tip = 0.35, 0.95
        lean = math.atan2(center, tip + top) + math.asin(radius / math.hypot(center, tip + top))  # of the tangent
        start, stop = -lean, math.pi - math.acos(center / radius)  # of the right arc, counterclockwise
        angles = [start + (stop - start) * i / 24 for i in range(25)]
        right = [(center + radius * math.cos(t), -top - radius * math.sin(t)) for t in angles]
        points = [(0, tip), *right, *((-x, y) for x, y in reversed(right))]
    return [(width * x, height * y) for x, y in points]


def _full_heart(rng: Random) -> list[Point]:
    """A heart between a deeply notched one and a circle."""
    share = rng.uniform(0.1, 0.5)  # of the distance to a circle
    heart = _heart(rng)
    factors = [1 - share + share * 0.9 / math.hypot(x, y) for x, y in heart]
    return [(x * factor, y * factor) for (x, y), factor in zip(heart, factors)]


def _cross(rng: Random) -> list[Point]:
    arm = rng.uniform(0.14, 0.42)  # half of its width
    points = [(arm, -1.0), (arm, -arm), (1.0, -arm)]
    for _ in range(3):  # quarters, each the one before turned
        points += [(-y, x) for x, y in points[-3:]]
    return points


OUTLINES: dict[str, Callable[[Random], list[Point]]] = {
    "circle": lambda rng: _star(64, rng.uniform(0.88, 1)),
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
    "star": lambda rng: _star(10, rng.uniform(0.95, 1.06), rng.uniform(0.36, 0.58)),
    "heart": _heart,
    "full heart": _full_heart,
    "cross": _cross,
    "ring": lambda rng: _star(64, 0.98),
}


# Backgrounds: masks, 0 where the bright tone shows and 255 where the dim one does.

Corners = tuple[int, int, int, int]  # values at the top left, top right, bottom left, bottom right
GRADIENTS: list[Corners] = [(0, 0, 255, 255), (0, 255, 0, 255), (0, 128, 128, 255), (128, 0, 255, 128)]
DIRECTIONS: list[Corners] = [direction for (a, b, c, d) in GRADIENTS for direction in ((a, b, c, d), (d, c, b, a))]


def _blend(corners: Corners, width: int, height: int) -> Image.Image:
    """An even blend of the values at four corners."""
    image = Image.frombytes("L", (2, 2), bytes(corners))
    return image.resize((width, height), Image.Resampling.BILINEAR, (0.5, 0.5, 1.5, 1.5))


def _glowing(rng: Random, width: int, height: int) -> Image.Image:
    left, top = rng.uniform(20, 76), rng.uniform(20, 76)  # the glow may be off center
    glow = Image.radial_gradient("L").point([min(255, round(1.6 * v)) for v in range(256)])
    return glow.resize((width, height), Image.Resampling.BILINEAR, (left, top, left + 160, top + 160))


def _random_grid(rng: Random, width: int, height: int, across: int) -> Image.Image:
    """A random grid with `across` values along the shorter side, whatever the size in pixels."""
    columns, rows = (round(across * side / min(width, height)) for side in (width, height))
    return Image.frombytes("L", (columns, rows), rng.randbytes(columns * rows))


def _noisy(rng: Random, width: int, height: int) -> Image.Image:
    contrast = [min(255, max(0, 128 + 3 * (v - 128))) for v in range(256)]
    grains = _random_grid(rng, width, height, rng.randint(40, 96)).point(contrast)
    return grains.resize((width, height), Image.Resampling.BILINEAR)


def _cloudy(rng: Random, width: int, height: int) -> Image.Image:
    return _random_grid(rng, width, height, rng.randint(4, 7)).resize((width, height), Image.Resampling.BICUBIC)


def _striped(rng: Random, canvas: Canvas, width: int, height: int) -> None:
    step = rng.uniform(0.1, 0.2) * min(width, height)
    angle = rng.choice((0, 45, 90, 135)) + rng.uniform(-6, 6)
    share = rng.uniform(0.35, 0.6)  # of the dim tone
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    far = width + height
    offset = rng.random()
    for i in range(-math.ceil(far / step), math.ceil(far / step)):
        u = (i + offset) * step
        v = (i + offset + share) * step
        corners = ((u, -far), (v, -far), (v, far), (u, far))
        canvas.polygon([(cos * p - sin * q, sin * p + cos * q) for p, q in corners], fill=255)


def _wavy(rng: Random, canvas: Canvas, width: int, height: int) -> None:
    short = min(width, height)
    step, swing, wave = (rng.uniform(*span) * short for span in ((0.12, 0.2), (0.03, 0.05), (0.22, 0.4)))
    phase = rng.uniform(0, 2 * math.pi)
    offset = rng.random()
    upright = rng.random() < 0.5
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


def _checkered(rng: Random, canvas: Canvas, width: int, height: int) -> None:
    step, cells = _cells(rng, width, height, 0.08, 0.15)
    for i, j, x, y in cells:
        if (i + j) % 2:
            canvas.rectangle((x, y, x + step, y + step), fill=255)


def _dotted(rng: Random, canvas: Canvas, width: int, height: int, shift: float = 0) -> None:
    """Dots, every other row of them shifted by this share of a step."""
    step, cells = _cells(rng, width, height, 0.09, 0.15)
    size = rng.uniform(0.35, 0.6) * step
    for _, row, x, y in cells:
        x -= step * shift * (row % 2)
        canvas.ellipse((x, y, x + size, y + size), fill=255)


def _gridded(rng: Random, canvas: Canvas, width: int, height: int) -> None:
    step, cells = _cells(rng, width, height, 0.09, 0.16)
    line = rng.uniform(0.014, 0.032) * min(width, height)
    for _, _, x, y in cells:
        canvas.rectangle((x, y, x + step, y + line), fill=255)
        canvas.rectangle((x, y, x + line, y + step), fill=255)


SOFT: dict[str, Callable[[Random, int, int], Image.Image]] = {
    "plain": lambda rng, width, height: Image.new("L", (width, height), rng.choice((0, 255))),
    "gradient": lambda rng, width, height: _blend(rng.choice(DIRECTIONS), width, height),
    "glowing": _glowing,
    "noisy": _noisy,
    "cloudy": _cloudy,
}
SHARP: dict[str, Callable[[Random, Canvas, int, int], None]] = {
    "striped": _striped,
    "wavy": _wavy,
    "checkered": _checkered,
    "dotted": _dotted,
    "staggered": partial(_dotted, shift=0.5),
    "gridded": _gridded,
}
