"""Scenes as values: their vocabulary, what is where, and `random_scene`, which makes one."""

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from random import Random

RGB = tuple[int, ...]

SHAPES = ("circle", "square", "triangle", "diamond", "star", "heart", "cross", "ring")
COLORS = {
    "red": (222, 30, 38), "orange": (255, 140, 10), "yellow": (255, 226, 35), "green": (30, 160, 65),
    "blue": (30, 85, 225), "purple": (132, 45, 182), "pink": (255, 110, 185), "brown": (148, 88, 44),
}  # fmt: skip
SIZES = {"small": (0.085, 0.100), "large": (0.145, 0.165)}  # radius, as a fraction of the image's shorter side
BACKGROUNDS = ("plain", "gradient", "glowing", "noisy", "cloudy", "striped", "wavy", "checkered", "dotted", "gridded")

# Never drawn in training: a caption that names one shows that the model learned colors and shapes separately.
WITHHELD = {
    ("red", "diamond"), ("orange", "ring"), ("yellow", "cross"), ("green", "heart"),
    ("blue", "star"), ("purple", "triangle"), ("pink", "circle"), ("brown", "square"),
}  # fmt: skip

UNNAMED_DISTANCE = 50  # a color at least this far from all of COLORS, in RGB, has no name here

# Distances are fractions of the image's width or height.
SAME_COLUMN = 0.035  # shapes closer than this in x are in one column
CLEAR_OFFSET = 0.09  # shapes further apart are clearly left, right, above or below; no x offset lies between the two
MARGIN = 0.012  # kept free along the border

PAIRS = tuple(product(COLORS, SHAPES))
TRAINED_PAIRS = tuple(pair for pair in PAIRS if pair not in WITHHELD)
GRIDS = ((2, 2), (2, 3), (3, 2), (3, 3), (4, 2), (4, 3))  # columns, rows


@dataclass(frozen=True)
class Shape:
    """One object: its center in widths and heights, its radius in shorter sides, its angle in degrees."""

    kind: str
    color: str
    size: str
    x: float
    y: float
    radius: float
    angle: float
    rgb: RGB

    @property
    def name(self) -> str:
        return f"{self.size} {self.color} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """Shapes in the order of the caption (later ones are drawn on top), and the seed of the drawing's details."""

    shapes: tuple[Shape, ...]
    background: str
    seed: int


def random_scene(rng: Random, *, withheld: bool = False, max_shapes: int = 4) -> Scene:
    """One to max_shapes different shapes on a grid or placed freely; withheld: at least one is a withheld pair."""
    n = rng.randint(1, max_shapes)
    on_grid = rng.random() < 0.5
    touching = not on_grid and n > 1 and rng.random() < 0.25
    while True:
        unplaced = _random_shapes(rng, n, withheld)
        positions = _grid_positions(rng, n) if on_grid else _free_positions(rng, unplaced, touching)
        shapes = [replace(shape, x=x, y=y) for shape, (x, y) in zip(unplaced, positions)]
        if _is_readable(shapes, touching):
            return Scene(_in_reading_order(shapes), rng.choice(BACKGROUNDS), rng.getrandbits(32))


def with_unnamed_colors(scene: Scene, rng: Random) -> Scene:
    """Recolor every shape in gray or a color without a name here; of a caption, only color names become wrong."""
    return replace(scene, shapes=tuple(replace(shape, rgb=_unnamed_color(rng)) for shape in scene.shapes))


def _unnamed_color(rng: Random) -> RGB:
    while True:
        if rng.random() < 0.15:
            rgb: RGB = (rng.randint(100, 155),) * 3
        else:
            hsv = rng.random(), rng.uniform(0.5, 1), rng.uniform(0.45, 1)
            rgb = tuple(round(255 * c) for c in colorsys.hsv_to_rgb(*hsv))
        if all(math.dist(rgb, color) >= UNNAMED_DISTANCE for color in COLORS.values()):
            return rgb


def _random_shapes(rng: Random, n: int, withheld: bool) -> list[Shape]:
    """n different shapes in random order, not placed yet."""
    pairs = rng.choices(PAIRS if withheld else TRAINED_PAIRS, k=n)
    if withheld:
        pairs[0] = rng.choice(sorted(WITHHELD))
    sizes = rng.choices(tuple(SIZES), (6, 6 + n), k=n)  # large shapes are rejected more often when placed
    if len(set(zip(pairs, sizes))) < n:  # two identical names would need a plural
        return _random_shapes(rng, n, withheld)
    shapes = []
    for (color, kind), size in zip(pairs, sizes):
        brightness = rng.uniform(0.94, 1.05)
        rgb = tuple(min(255, max(0, round(brightness * c + rng.uniform(-9, 9)))) for c in COLORS[color])
        shapes.append(Shape(kind, color, size, 0, 0, rng.uniform(*SIZES[size]), rng.uniform(-8, 8), rgb))
    rng.shuffle(shapes)
    return shapes


def _grid_positions(rng: Random, n: int) -> list[tuple[float, float]]:
    columns, rows = rng.choice(GRIDS)

    def tick(i: int, n: int) -> float:
        """The i-th of n even steps from near 0 to near 1."""
        first = 0.25 if n == 2 else 0.18
        return first + i * (1 - 2 * first) / (n - 1)

    cells = rng.sample(list(product(range(columns), range(rows))), n)
    # two shapes of one column differ by less than SAME_COLUMN
    return [
        (tick(column, columns) + rng.uniform(-0.49, 0.49) * SAME_COLUMN, tick(row, rows) + rng.uniform(-0.03, 0.03))
        for column, row in cells
    ]


def _free_positions(rng: Random, shapes: Sequence[Shape], touching: bool) -> list[tuple[float, float]]:
    radii = [shape.radius for shape in shapes]
    positions = [(rng.uniform(r + MARGIN, 1 - r - MARGIN), rng.uniform(r + MARGIN, 1 - r - MARGIN)) for r in radii]
    if touching:  # the second moves onto the rim of the first
        (x, y), a, b = positions[0], *radii[:2]
        direction = rng.uniform(0, 2 * math.pi)
        distance = a + b - rng.uniform(0.05, 0.14) * 2 * min(a, b)
        positions[1] = x + distance * math.cos(direction), y + distance * math.sin(direction)
    return positions


def _is_readable(shapes: Sequence[Shape], touching: bool) -> bool:
    """Check whether all are inside the image, none is hidden, and the order from left to right is unambiguous."""
    if any(min(s.x, s.y, 1 - s.x, 1 - s.y) < s.radius + MARGIN for s in shapes):
        return False
    touches = 0
    for a, b in combinations(shapes, 2):
        dx = abs(a.x - b.x)
        dy = abs(a.y - b.y)
        if SAME_COLUMN <= dx < CLEAR_OFFSET or (dx < SAME_COLUMN and dy < 0.15):
            return False
        touches += math.hypot(dx, dy) - a.radius - b.radius < 0.02
    return touches == int(touching)  # by _free_positions, which hides little of the first


def _in_reading_order(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Columns from left to right, each from top to bottom."""

    def place(shape: Shape) -> tuple[int, float]:
        return sum(shape.x - other.x >= SAME_COLUMN for other in shapes), shape.y

    return tuple(sorted(shapes, key=place))
