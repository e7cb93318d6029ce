"""Postcards: a second drawn domain that the embedded model has never seen, with other objects and other phrasing.

One to three objects of a kind stand on the ground, one thing is in the sky, and it is some time of day. A `Postcard` is
a pure function of its seed. There are 432 captions, of which 200 random postcards show about a third.
"""

import colorsys
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

Color = tuple[int, int, int]
Polygon = list[tuple[float, float]]

TIMES = {"Dawn": ((250, 170, 120), (255, 225, 200)), "Noon": ((120, 185, 240), (205, 230, 250)),
         "Night": ((10, 12, 45), (45, 50, 95))}  # colors of the sky at the top and at the horizon  # fmt: skip
GROUNDS = {"snow": (240, 244, 250), "grass": (70, 140, 60), "sand": (225, 195, 120)}
THINGS = ("house", "fir", "tent", "windmill")
SKY_THINGS = ("cloud", "kite", "moon", "balloon")
NUMBERS = ("One", "Two", "Three")
SUPERSAMPLING = 3  # drawn larger, then averaged


@dataclass(frozen=True)
class Postcard:
    """What its caption names, and the seed of everything else."""

    number: int
    thing: str
    ground: str
    above: str
    time: str
    seed: int

    @property
    def caption(self) -> str:
        things = self.thing if self.number == 1 else f"{self.thing}s"
        return f"{self.time}. {NUMBERS[self.number - 1]} {things} on the {self.ground}, a {self.above} overhead."


def random_postcard(rng: Random) -> Postcard:
    return Postcard(
        rng.randint(1, 3),
        rng.choice(THINGS),
        rng.choice(tuple(GROUNDS)),
        rng.choice(SKY_THINGS),
        rng.choice(tuple(TIMES)),
        rng.getrandbits(32),
    )


def draw(card: Postcard) -> Image.Image:
    """The postcard as an RGB image of 120 to 200 pixels a side."""
    rng = Random(card.seed)
    width, height = rng.randint(120, 200), rng.randint(120, 200)
    horizon = rng.uniform(0.62, 0.7)
    high, low = ([c + rng.randint(-10, 10) for c in tone] for tone in TIMES[card.time])
    sky = Image.linear_gradient("L").resize((SUPERSAMPLING * width, SUPERSAMPLING * height))
    image = Image.composite(Image.new("RGB", sky.size, _rgb(low)), Image.new("RGB", sky.size, _rgb(high)), sky)
    canvas = ImageDraw.Draw(image)

    def polygon(points: Polygon, x: float, y: float, size: float, color: Color) -> None:
        """Draw points around (0, 0), y upwards, at (x, y) of the image, in units of size."""
        short = size * min(image.size)
        canvas.polygon([(x * image.width + short * u, y * image.height - short * v) for u, v in points], color)

    tone = _rgb(c + rng.randint(-12, 12) for c in GROUNDS[card.ground])
    canvas.rectangle((0, horizon * image.height, *image.size), tone)
    position = rng.uniform(0.18, 0.82), rng.uniform(0.2, 0.28)
    for points, color in _sky_thing(card.above, rng):
        polygon(points, *position, 0.17, color)
    for i in range(card.number):
        x = (i + 1) / (card.number + 1) + rng.uniform(-0.03, 0.03)
        y, size = horizon + rng.uniform(0.06, 0.16), rng.uniform(0.22, 0.25)
        for points, color in _thing(card.thing, rng):
            polygon(points, x, y, size, color)
    return image.reduce(SUPERSAMPLING)


def write_folder(folder: Path, cards: list[Postcard]) -> None:
    """Write an image folder with a .txt caption beside each image."""
    folder.mkdir(parents=True)
    for i, card in enumerate(cards):
        draw(card).save(folder / f"{i:03}.png")
        (folder / f"{i:03}.txt").write_text(card.caption + "\n", encoding="utf-8")


def _rgb(values: Iterable[float]) -> Color:
    red, green, blue = (min(255, max(0, round(value))) for value in values)
    return red, green, blue


def _ellipse(x: float, y: float, a: float, b: float, n: int = 32) -> Polygon:
    return [(x + a * math.cos(2 * math.pi * i / n), y + b * math.sin(2 * math.pi * i / n)) for i in range(n)]


def _paint(rng: Random, low: float = 0.0, high: float = 1.0) -> Color:
    """A bright color with a hue from low to high."""
    return _rgb(255 * c for c in colorsys.hsv_to_rgb(rng.uniform(low, high), 0.75, 0.85))


def _thing(kind: str, rng: Random) -> Iterator[tuple[Polygon, Color]]:
    """Polygons and their colors, back to front; the base at (0, 0), about 1 high."""
    if kind == "house":
        yield [(-0.4, 0), (0.4, 0), (0.4, 0.55), (-0.4, 0.55)], _paint(rng)
        yield [(-0.5, 0.55), (0.5, 0.55), (0, 1)], (150, 50, 40)
        yield [(-0.1, 0), (0.1, 0), (0.1, 0.3), (-0.1, 0.3)], (60, 40, 30)
    elif kind == "fir":
        yield [(-0.07, 0), (0.07, 0), (0.07, 0.3), (-0.07, 0.3)], (100, 65, 35)
        for y in (0.2, 0.45, 0.7):
            yield [(-0.45 + 0.4 * y, y), (0.45 - 0.4 * y, y), (0, y + 0.42)], (20, 90 + rng.randint(-15, 15), 50)
    elif kind == "tent":
        yield [(-0.55, 0), (0.55, 0), (0, 0.65)], _paint(rng, 0.48, 0.62)
        yield [(-0.15, 0), (0.15, 0), (0, 0.5)], (35, 30, 30)
    else:
        yield [(-0.2, 0), (0.2, 0), (0.12, 0.7), (-0.12, 0.7)], (235, 230, 220)
        turn = rng.uniform(0, math.pi / 2)
        for sail in range(4):
            cos, sin = math.cos(turn + sail * math.pi / 2), math.sin(turn + sail * math.pi / 2)
            blade = [(0, 0), (0.5, 0.07), (0.5, -0.07)]
            yield [(cos * u - sin * v, 0.7 + sin * u + cos * v) for u, v in blade], (120, 60, 30)


def _sky_thing(kind: str, rng: Random) -> Iterator[tuple[Polygon, Color]]:
    if kind == "cloud":
        for x, y, a in ((-0.6, 0, 0.5), (0, 0.2, 0.65), (0.6, 0, 0.5)):
            yield _ellipse(x, y, a, 0.7 * a), (225, 228, 235)
    elif kind == "kite":
        yield [(0, -0.7), (0.1, -0.7), (0.45, -1.6), (0.35, -1.6)], (90, 90, 90)
        yield [(0, 1), (0.65, 0.2), (0, -0.8), (-0.65, 0.2)], _paint(rng, 0.93, 1.03)
    elif kind == "moon":
        outer, inner = _ellipse(0, 0, 0.8, 0.8), _ellipse(0.35, 0, 0.62, 0.68)
        yield [p for p in outer if p[0] < 0.4] + [p for p in reversed(inner) if p[0] < 0.4], (250, 240, 170)
    else:
        yield _ellipse(0, 0.25, 0.7, 0.75), _paint(rng, 0.7, 0.85)
        yield [(-0.2, -0.75), (0.2, -0.75), (0.17, -1.1), (-0.17, -1.1)], (110, 70, 40)
