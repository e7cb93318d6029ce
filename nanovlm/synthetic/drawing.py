"""A Scene becomes a picture: a background mixed from two quiet tones, and antialiased shapes on it."""

import math
from random import Random

from PIL import Image, ImageChops, ImageDraw

from nanovlm.synthetic.scene import Scene, Shape

# Bright and dim tone. Every mixture of the two stays far from every object's colour.
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
_FINE = 3  # patterns and shapes are drawn this many times larger, then averaged


def draw(scene: Scene, width: int = 192, height: int = 192) -> Image.Image:
    """The scene as an RGB picture; the same scene looks the same at every size."""
    if min(width, height) < 16:
        raise ValueError(f"a picture of {width}x{height} is too small to draw on: use at least 16 pixels a side")
    rng = Random(scene.seed)
    bright, dim = (tuple(c + rng.randint(-4, 4) for c in tone) for tone in rng.choice(TONES))
    picture = Image.new("RGB", (width, height), bright)
    picture.paste(dim, mask=_mask(scene.background, rng, width, height))
    for thing in scene.things:
        _draw_thing(picture, thing, rng)
    return picture


# Shapes: points around (0, 0) that reach about 1; y points down.


def _around(n, *radii):
    """n points around the centre from the top, their distances cycling through radii."""
    turn = 2 * math.pi / n
    return [(radii[i % len(radii)] * math.sin(i * turn), -radii[i % len(radii)] * math.cos(i * turn)) for i in range(n)]


def _heart(t):
    y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
    return 0.98 * math.sin(t) ** 3, -y / 16 - 0.1


_A = 0.33  # half the width of the cross's arms
_POINTS = {
    "circle": _around(64, 0.94),
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "triangle": [(0, -0.95), (0.9, 0.7), (-0.9, 0.7)],
    "diamond": [(0, -1), (0.8, 0), (0, 1), (-0.8, 0)],
    "star": _around(10, 1.04, 0.44),
    "heart": [_heart(2 * math.pi * i / 48) for i in range(48)],
    "cross": [(-_A, -1), (_A, -1), (_A, -_A), (1, -_A), (1, _A), (_A, _A)]
    + [(_A, 1), (-_A, 1), (-_A, _A), (-1, _A), (-1, -_A), (-_A, -_A)],
    "ring": _around(64, 0.98),
}
_HOLE = _around(64, 0.55)


def _draw_thing(picture, thing: Shape, rng):
    """Paint one thing, flat, outlined or softly shaded."""
    style = rng.choice(("flat", "flat", "outlined", "shaded"))
    lean = rng.choice(_LEANS)
    radius = thing.radius * min(picture.size)
    x, y = thing.x * picture.width, thing.y * picture.height
    left, top = math.floor(x - 1.1 * radius) - 1, math.floor(y - 1.1 * radius) - 1
    side = math.ceil(2.2 * radius) + 3  # the thing's own small canvas
    cos, sin = math.cos(math.radians(thing.angle)), math.sin(math.radians(thing.angle))

    def place(points):
        return [
            (_FINE * (x - left + radius * (cos * u - sin * v)), _FINE * (y - top + radius * (sin * u + cos * v)))
            for u, v in points
        ]

    inside, canvas = _canvas(side, side)
    canvas.polygon(place(_POINTS[thing.shape]), fill=255)
    if thing.shape == "ring":
        canvas.polygon(place(_HOLE), fill=0)
    inside = inside.reduce(_FINE)
    picture.paste(thing.rgb, (left, top), inside)
    if style == "outlined":
        tone = tuple(round(c * 0.6) for c in thing.rgb)
        edge, canvas = _canvas(side, side)
        canvas.polygon(place(_POINTS[thing.shape]), outline=255, width=max(1, round(_FINE * radius * 0.09)))
        picture.paste(tone, (left, top), edge.reduce(_FINE))
    elif style == "shaded":
        tone = tuple(round(c * 0.87) for c in thing.rgb)
        picture.paste(tone, (left, top), ImageChops.multiply(inside, _blend(lean, side, side)))


# Backgrounds: masks, 0 where the bright tone shows and 255 where the dim one does.

_DOWN, _ACROSS, _SLANTED, _COUNTER = (0, 0, 255, 255), (0, 255, 0, 255), (0, 128, 128, 255), (128, 0, 255, 128)
_LEANS = [lean for corners in (_DOWN, _ACROSS, _SLANTED, _COUNTER) for lean in (corners, corners[::-1])]


def _blend(corners, width, height):
    """An even blend of four values: top left, top right, bottom left, bottom right."""
    return Image.frombytes("L", (2, 2), bytes(corners)).resize((width, height), Image.BILINEAR, (0.5, 0.5, 1.5, 1.5))


def _canvas(width, height):
    mask = Image.new("L", (_FINE * width, _FINE * height))
    return mask, ImageDraw.Draw(mask)


def _mask(background, rng, width, height):
    if background in _SOFT:
        return _SOFT[background](rng, width, height)
    mask, canvas = _canvas(width, height)
    _SHARP[background](rng, canvas, *mask.size)
    return mask.reduce(_FINE)


def _plain(rng, width, height):
    return Image.new("L", (width, height), rng.choice((0, 255)))


def _gradient(rng, width, height):
    return _blend(rng.choice(_LEANS), width, height)


def _glowing(rng, width, height):
    left, top = rng.uniform(20, 76), rng.uniform(20, 76)  # the glow need not be in the middle
    glow = Image.radial_gradient("L").point([min(255, round(1.6 * v)) for v in range(256)])
    return glow.resize((width, height), Image.BILINEAR, (left, top, left + 160, top + 160))


def _grains(rng, width, height, across):
    """Random values, `across` of them along the shorter side, whatever the size in pixels."""
    size = tuple(round(across * side / min(width, height)) for side in (width, height))
    return Image.frombytes("L", size, rng.randbytes(size[0] * size[1]))


def _noisy(rng, width, height):
    grains = _grains(rng, width, height, 64).point([min(255, max(0, 128 + 3 * (v - 128))) for v in range(256)])
    return grains.resize((width, height), Image.BILINEAR)


def _cloudy(rng, width, height):
    return _grains(rng, width, height, 5).resize((width, height), Image.BICUBIC)


def _striped(rng, canvas, width, height):
    step = rng.uniform(0.13, 0.19) * min(width, height)
    angle = rng.choice((0, 45, 90, 135))
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    far = width + height
    offset = rng.random()
    for i in range(-math.ceil(far / step), math.ceil(far / step)):
        u, v = (i + offset) * step, (i + offset + 0.5) * step
        corners = ((u, -far), (v, -far), (v, far), (u, far))
        canvas.polygon([(cos * p - sin * q, sin * p + cos * q) for p, q in corners], fill=255)


def _wavy(rng, canvas, width, height):
    short = min(width, height)
    step, swing, wave = (rng.uniform(*span) * short for span in ((0.14, 0.18), (0.035, 0.045), (0.26, 0.36)))
    phase, offset, upright = rng.uniform(0, 2 * math.pi), rng.random(), rng.random() < 0.5
    along, aside = (height, width) if upright else (width, height)
    xs = [i * wave / 16 for i in range(math.ceil(16 * along / wave) + 2)]
    for i in range(-2, math.ceil(aside / step) + 1):
        upper = [(x, (i + offset) * step + swing * math.sin(2 * math.pi * x / wave + phase)) for x in xs]
        band = upper + [(x, y + step / 2) for x, y in reversed(upper)]
        canvas.polygon([(y, x) for x, y in band] if upright else band, fill=255)


def _cells(rng, width, height, low, high):
    """A square lattice over everything: its step and its corners."""
    step = rng.uniform(low, high) * min(width, height)
    left, top = -step * rng.random(), -step * rng.random()
    columns, rows = math.ceil(width / step) + 1, math.ceil(height / step) + 1
    return step, [(i, j, left + i * step, top + j * step) for j in range(rows) for i in range(columns)]


def _checkered(rng, canvas, width, height):
    step, cells = _cells(rng, width, height, 0.09, 0.125)
    for i, j, x, y in cells:
        if (i + j) % 2:
            canvas.rectangle((x, y, x + step, y + step), fill=255)


def _dotted(rng, canvas, width, height):
    step, cells = _cells(rng, width, height, 0.10, 0.13)
    for _, _, x, y in cells:
        canvas.ellipse((x, y, x + 0.42 * step, y + 0.42 * step), fill=255)


def _gridded(rng, canvas, width, height):
    step, cells = _cells(rng, width, height, 0.11, 0.15)
    line = 0.02 * min(width, height)
    for _, _, x, y in cells:
        canvas.rectangle((x, y, x + step, y + line), fill=255)
        canvas.rectangle((x, y, x + line, y + step), fill=255)


_SOFT = {"plain": _plain, "gradient": _gradient, "glowing": _glowing, "noisy": _noisy, "cloudy": _cloudy}
_SHARP = {"striped": _striped, "wavy": _wavy, "checkered": _checkered, "dotted": _dotted, "gridded": _gridded}
