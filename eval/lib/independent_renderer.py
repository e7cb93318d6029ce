"""A second renderer of `nanovlm.synthetic` scenes, to measure the embedded model on images that training did not draw.

It shares no code with nanovlm/synthetic/drawing.py and reads only a scene's values: which shape is where, its named
color and its size, and the kind of background. Its geometry, colors, backgrounds and styles are its own: thin and thick
crosses, wide and thin rings, hearts of two kinds, blunt and sharp stars, narrow and wide diamonds, rounded squares.

A shape is an implicit function: whether the point (u, v) is inside, with u to the right, v up and the shape's radius as
unit. A background mixes two tones at each point (x, y), with the image's shorter side as unit.
"""

import math
from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from nanovlm.synthetic import COLORS, Scene, Shape

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Inside = Callable[[Floats, Floats], Mask]  # (u, v) -> whether inside
Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels

COLOR_SPREAD = 12  # of each channel around the named color
RIM = 0.45  # brightness of a rim; that of orange at 0.6 would be brown
REACH = 1.25  # every shape with its rim and shadow ends within this many radii
TONES = (  # muted pairs; every mixture of the two is far from the color of every shape
    ((250, 250, 250), (200, 200, 203)),
    ((220, 232, 236), (166, 182, 190)),
    ((226, 236, 216), (170, 186, 164)),
    ((238, 230, 232), (192, 180, 186)),
    ((236, 232, 218), (190, 184, 166)),
    ((88, 90, 92), (36, 37, 40)),
    ((66, 72, 84), (22, 26, 36)),
    ((70, 78, 70), (26, 34, 30)),
    ((78, 68, 80), (34, 26, 38)),
)


def draw(scene: Scene, width: int = 192, height: int = 192) -> Image.Image:
    """The scene as an RGB image of width x height pixels; the same one for the same arguments."""
    rng = Random(f"independent {scene.seed}")
    bright, dim = rng.choice(TONES)
    mix = _sample(partial(BACKGROUNDS[scene.background], rng), (0, 0, width, height), min(width, height), 2)[..., None]
    if scene.background == "glowing" or rng.random() < 0.5:  # what glows is bright in the middle
        bright, dim = dim, bright
    pixels = (1 - mix) * np.array(bright, float) + mix * np.array(dim, float)
    for shape in scene.shapes:
        _paint(pixels, shape, rng)
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


def _sample(function: Callable[[Floats, Floats], NDArray], box: Box, unit: float, n: int) -> Floats:
    """The mean of function(x, y) over n x n points of each pixel of box, x and y in units; (height, width)."""
    left, top, right, bottom = box
    x = (left + (np.arange(n * (right - left)) + 0.5) / n) / unit
    y = (top + (np.arange(n * (bottom - top)) + 0.5) / n) / unit
    values = np.broadcast_to(function(x[None, :], y[:, None]), (y.size, x.size))
    return values.reshape(bottom - top, n, right - left, n).mean((1, 3), dtype=float)


def _paint(pixels: Floats, shape: Shape, rng: Random) -> None:
    """Paint one shape, flat, with a darker rim around it, or lit from above with a faint shadow."""
    height, width, _ = pixels.shape
    radius = shape.radius * min(height, width)
    x, y = shape.x * width, shape.y * height
    reach = REACH * radius
    box = (max(0, math.floor(x - reach)), max(0, math.floor(y - reach)),
           min(width, math.ceil(x + reach)), min(height, math.ceil(y + reach)))  # fmt: skip
    rgb = np.clip([c + rng.randint(-COLOR_SPREAD, COLOR_SPREAD) for c in COLORS[shape.color]], 0, 255).astype(float)
    style = rng.choice(("flat", "flat", "rimmed", "lit"))
    coverage = _sample(_placed(outline(shape.kind, rng), shape.angle, x, y, radius), box, 1, 4)
    area = pixels[box[1] : box[3], box[0] : box[2]]
    if style == "rimmed":
        rim = Image.fromarray(np.rint(255 * coverage).astype(np.uint8))
        rim = rim.filter(ImageFilter.GaussianBlur(0.05 * radius)).point([min(255, 4 * v) for v in range(256)])
        _blend(area, RIM * rgb, np.asarray(rim) / 255)
    elif style == "lit":
        shift = max(1, round(0.07 * radius))
        shadow = np.zeros_like(coverage)
        shadow[shift:, shift:] = coverage[:-shift, :-shift]
        _blend(area, np.zeros(3), 0.25 * shadow)
        rgb = rgb * np.linspace(1.06, 0.94, len(area))[:, None, None]
    _blend(area, rgb, coverage)


def _blend(area: Floats, rgb: Floats, alpha: Floats) -> None:
    area += alpha[..., None] * (rgb - area)


def _placed(inside: Inside, angle: float, x: float, y: float, radius: float) -> Inside:
    """The same shape in pixels: around (x, y), turned clockwise by angle degrees."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))

    def inside_pixels(px: Floats, py: Floats) -> Mask:
        dx, dy = (px - x) / radius, (py - y) / radius
        return inside(cos * dx + sin * dy, sin * dx - cos * dy)

    return inside_pixels


# Shapes


def outline(kind: str, rng: Random) -> Inside:
    """A shape of this kind with random proportions."""
    pick = rng.uniform
    if kind == "circle":
        return partial(circle, radius=pick(0.9, 1))
    if kind == "square":
        return partial(square, half=pick(0.76, 0.86), corner=pick(0, 0.25))
    if kind == "triangle":
        return partial(triangle, half_base=pick(0.68, 0.95))
    if kind == "diamond":
        return partial(diamond, half_width=pick(0.55, 0.95))
    if kind == "star":
        return partial(star, inner=pick(0.35, 0.6))
    if kind == "cross":
        return partial(cross, arm=pick(0.14, 0.42))
    if kind == "ring":
        return partial(ring, hole=pick(0.4, 0.8))
    return rng.choice((partial(heart_of_circles, lobe=pick(0.47, 0.52)), heart_curve))


def circle(u: Floats, v: Floats, radius: float) -> Mask:
    return u * u + v * v <= radius**2


def square(u: Floats, v: Floats, half: float, corner: float) -> Mask:
    """Half as wide as `half`, with corners rounded by a circle of radius `corner`."""
    inner = half - corner
    du, dv = np.maximum(np.abs(u) - inner, 0), np.maximum(np.abs(v) - inner, 0)
    return np.hypot(du, dv) <= corner if corner else (np.abs(u) <= half) & (np.abs(v) <= half)


def triangle(u: Floats, v: Floats, half_base: float) -> Mask:
    """From the base at v = -0.65 to the top at v = 0.95; equilateral for a half_base of 0.92."""
    return (v >= -0.65) & (np.abs(u) <= half_base * (0.95 - v) / 1.6)


def diamond(u: Floats, v: Floats, half_width: float) -> Mask:
    return np.abs(u) / half_width + np.abs(v) <= 1


def star(u: Floats, v: Floats, inner: float) -> Mask:
    """Five points at distance 1, the first at the top, and five notches at distance `inner`."""
    tenth = math.pi / 5
    angle = np.abs((np.arctan2(u, v) + tenth) % (2 * tenth) - tenth)  # from the nearest point: 0 to a tenth of a turn
    distance = np.hypot(u, v)
    along, across = distance * np.cos(angle), distance * np.sin(angle)
    notch_along, notch_across = inner * math.cos(tenth), inner * math.sin(tenth)
    return (1 - along) * notch_across >= across * (1 - notch_along)


def heart_of_circles(u: Floats, v: Floats, lobe: float) -> Mask:
    """Two circles of radius `lobe` and a triangle whose sides touch them and meet at (0, -0.95)."""
    x, y, tip = 0.46, 0.36, -0.95
    to_center = math.hypot(x, y - tip)
    slope = math.tan(math.asin(lobe / to_center) + math.atan2(x, y - tip))
    touch = tip + (to_center**2 - lobe**2) ** 0.5 / math.hypot(1, slope)  # where the sides end
    u = np.abs(u)
    circles = np.hypot(u - x, v - y) <= lobe
    return circles | ((v <= touch) & (u <= slope * (v - tip))) | ((u <= x) & (v >= touch) & (v <= y))


def heart_curve(u: Floats, v: Floats) -> Mask:
    """The curve (x^2 + y^2 - 1)^3 = x^2 y^3."""
    x, y = 1.2 * u, 1.2 * v + 0.08
    return (x * x + y * y - 1) ** 3 <= x * x * y**3


def cross(u: Floats, v: Floats, arm: float) -> Mask:
    """Arms that are 2 long and 2 * arm wide."""
    u, v = np.abs(u), np.abs(v)
    return ((u <= arm) & (v <= 1)) | ((v <= arm) & (u <= 1))


def ring(u: Floats, v: Floats, hole: float) -> Mask:
    squared = u * u + v * v
    return (squared <= 1) & (squared >= hole**2)


# Backgrounds, whose values are the share of the second tone at each point


def waves(x: Floats, y: Floats, length: float, angle: float, phase: float) -> Floats:
    """A cosine of this wavelength along a direction; angle in degrees."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return 0.5 + 0.5 * np.cos(2 * math.pi * ((cos * x + sin * y) / length + phase))


def plain(rng: Random, x: Floats, y: Floats) -> NDArray:
    return np.zeros(())


def gradient(rng: Random, x: Floats, y: Floats) -> NDArray:
    angle = rng.uniform(0, 2 * math.pi)
    return np.clip(0.5 + math.cos(angle) * (x - 0.5) + math.sin(angle) * (y - 0.5), 0, 1)


def glowing(rng: Random, x: Floats, y: Floats) -> NDArray:
    left, top, width = rng.uniform(0.35, 0.65), rng.uniform(0.35, 0.65), rng.uniform(0.3, 0.4)
    return np.exp(-((x - left) ** 2 + (y - top) ** 2) / (2 * width**2))


def noisy(rng: Random, x: Floats, y: Floats) -> NDArray:
    """Square grains, each of its own tone."""
    grains = np.random.default_rng(rng.getrandbits(32)).uniform(size=(200, 200))
    across = rng.uniform(48, 72)
    return grains[(across * y).astype(int), (across * x).astype(int)]


def cloudy(rng: Random, x: Floats, y: Floats) -> NDArray:
    """Eight waves of random length and direction, added."""
    parts = [waves(x, y, rng.uniform(0.3, 0.6), 45 * i + rng.uniform(0, 45), rng.random()) for i in range(8)]
    return np.clip(0.5 + 0.9 * (sum(parts) / 4 - 1), 0, 1)


def striped(rng: Random, x: Floats, y: Floats) -> NDArray:
    length, angle = rng.uniform(0.12, 0.2), rng.choice((0, 45, 90, 135)) + rng.uniform(-8, 8)
    return waves(x, y, length, angle, rng.random()) > rng.uniform(0.4, 0.6)


def wavy(rng: Random, x: Floats, y: Floats) -> NDArray:
    step, swing, length = rng.uniform(0.13, 0.19), rng.uniform(0.03, 0.045), rng.uniform(0.25, 0.38)
    phases = rng.random(), rng.random()
    along, across = (y, x) if rng.random() < 0.5 else (x, y)
    return waves(along, across + 2 * swing * waves(along, across, length, 0, phases[0]), step, 90, phases[1]) > 0.5


def checkered(rng: Random, x: Floats, y: Floats) -> NDArray:
    step, left, top = rng.uniform(0.085, 0.13), rng.random(), rng.random()
    return (np.floor(x / step + left) + np.floor(y / step + top)) % 2


def dotted(rng: Random, x: Floats, y: Floats) -> NDArray:
    """Round dots; every other row is shifted by half a step."""
    step, left, top = rng.uniform(0.1, 0.13), rng.random(), rng.random()
    row = np.floor(y / step + top)
    across, down = (x / step + left + 0.5 * (row % 2)) % 1 - 0.5, (y / step + top) % 1 - 0.5
    return np.hypot(across, down) <= rng.uniform(0.19, 0.25)


def gridded(rng: Random, x: Floats, y: Floats) -> NDArray:
    step, left, top = rng.uniform(0.11, 0.16), rng.random(), rng.random()
    line = rng.uniform(0.016, 0.024) / step
    return ((x / step + left) % 1 < line) | ((y / step + top) % 1 < line)


BACKGROUNDS = {
    background.__name__: background
    for background in (plain, gradient, glowing, noisy, cloudy, striped, wavy, checkered, dotted, gridded)
}
