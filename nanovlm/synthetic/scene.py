"""What is where: the vocabulary of the scenes, a Scene as a value, and random_scene, which makes one."""

import colorsys
import math
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random

SHAPES = ("circle", "square", "triangle", "diamond", "star", "heart", "cross", "ring")
COLOURS = {
    "red": (222, 30, 38),
    "orange": (255, 140, 10),
    "yellow": (255, 226, 35),
    "green": (30, 160, 65),
    "blue": (30, 85, 225),
    "purple": (132, 45, 182),
    "pink": (255, 110, 185),
    "brown": (148, 88, 44),
}
SIZES = {"small": (0.085, 0.100), "large": (0.145, 0.165)}  # radius, as a fraction of the picture's shorter side
BACKGROUNDS = (
    "plain",
    "gradient",
    "glowing",
    "noisy",
    "cloudy",
    "striped",
    "wavy",
    "checkered",
    "dotted",
    "gridded",
)

# Never drawn in training, so that a caption naming one shows that colours and shapes were learned apart.
WITHHELD = frozenset(
    {
        ("red", "diamond"),
        ("orange", "ring"),
        ("yellow", "cross"),
        ("green", "heart"),
        ("blue", "star"),
        ("purple", "triangle"),
        ("pink", "circle"),
        ("brown", "square"),
    }
)

NAMELESS = 50  # a colour further than this from all of COLOURS, in RGB, has no name here

SAME = 0.035  # closer than this in x: one column
CLEAR = 0.09  # further than this: clearly left, right, above or below; nothing in x lies between the two
EDGE = 0.012  # kept free along the frame

_PAIRS = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
_TRAINED = tuple(pair for pair in _PAIRS if pair not in WITHHELD)
_GRIDS = ((2, 2), (2, 3), (3, 2), (3, 3), (4, 2), (4, 3))  # columns, rows


@dataclass(frozen=True)
class Shape:
    """One object: its centre in widths and heights, its radius in shorter sides, its angle in degrees."""

    shape: str
    colour: str
    size: str
    x: float
    y: float
    radius: float
    angle: float
    rgb: tuple[int, int, int]

    @property
    def name(self) -> str:
        return f"{self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """Things in the order a caption tells them (later ones are drawn on top), and the seed of the drawing's details."""

    things: tuple[Shape, ...]
    background: str
    seed: int


def names_withheld(scene: Scene) -> bool:
    """Whether a caption of this scene names a withheld pair."""
    return any((thing.colour, thing.shape) in WITHHELD for thing in scene.things)


def random_scene(rng: Random, *, withheld: bool = False) -> Scene:
    """One to four different things on a grid or placed freely; with `withheld`, at least one is a withheld pair."""
    n = rng.randint(1, 4)
    on_grid = rng.random() < 0.5
    touching = not on_grid and n > 1 and rng.random() < 0.25
    while True:
        things = _random_things(rng, n, withheld)
        places = _grid_places(rng, n) if on_grid else _free_places(rng, things, touching)
        things = [Shape(*thing[:3], x, y, *thing[3:]) for thing, (x, y) in zip(things, places)]
        if _readable(things, touching):
            return Scene(_in_reading_order(things), rng.choice(BACKGROUNDS), rng.getrandbits(32))


def unnamed(scene: Scene, rng: Random) -> Scene:
    """The scene with every thing in some colour between the named ones, or grey: all but the colours' names holds."""
    return replace(scene, things=tuple(replace(thing, rgb=_nameless(rng)) for thing in scene.things))


def _nameless(rng):
    while True:
        if rng.random() < 0.15:
            rgb = (rng.randint(100, 155),) * 3
        else:
            hsv = rng.random(), rng.uniform(0.5, 1), rng.uniform(0.45, 1)
            rgb = tuple(round(255 * c) for c in colorsys.hsv_to_rgb(*hsv))
        if all(math.dist(rgb, colour) >= NAMELESS for colour in COLOURS.values()):
            return rgb


def _random_things(rng, n, withheld):
    """n different (shape, colour, size, radius, angle, rgb), in random order."""
    pairs = rng.choices(_PAIRS if withheld else _TRAINED, k=n)
    if withheld:
        pairs[0] = rng.choice(sorted(WITHHELD))
    sizes = rng.choices(tuple(SIZES), (6, 6 + n), k=n)  # large ones find no place more often
    if len(set(zip(pairs, sizes))) < n:  # two identical names would need a plural
        return _random_things(rng, n, withheld)
    things = []
    for (colour, shape), size in zip(pairs, sizes):
        light = rng.uniform(0.94, 1.05)
        rgb = tuple(min(255, max(0, round(light * c + rng.uniform(-9, 9)))) for c in COLOURS[colour])
        things.append((shape, colour, size, rng.uniform(*SIZES[size]), rng.uniform(-8, 8), rgb))
    rng.shuffle(things)
    return things


def _grid_places(rng, n):
    columns, rows = rng.choice(_GRIDS)
    cells = rng.sample([(column, row) for column in range(columns) for row in range(rows)], n)
    # two of one column differ by less than SAME
    return [
        (_tick(column, columns) + rng.uniform(-0.49, 0.49) * SAME, _tick(row, rows) + rng.uniform(-0.03, 0.03))
        for column, row in cells
    ]


def _tick(i, n):
    """The i-th of n even steps from near 0 to near 1."""
    first = 0.25 if n == 2 else 0.18
    return first + i * (1 - 2 * first) / (n - 1)


def _free_places(rng, things, touching):
    radii = [thing[3] for thing in things]
    places = [(rng.uniform(r + EDGE, 1 - r - EDGE), rng.uniform(r + EDGE, 1 - r - EDGE)) for r in radii]
    if touching:  # the second moves onto the rim of the first
        (x, y), a, b = places[0], *radii[:2]
        direction = rng.uniform(0, 2 * math.pi)
        distance = a + b - rng.uniform(0.05, 0.14) * 2 * min(a, b)
        places[1] = x + distance * math.cos(direction), y + distance * math.sin(direction)
    return places


def _readable(things, touching):
    """All inside the picture, none hidden, and left-to-right order beyond doubt."""
    for thing in things:
        reach = thing.radius + EDGE
        if not (reach <= thing.x <= 1 - reach and reach <= thing.y <= 1 - reach):
            return False
    touches = 0
    for a, b in combinations(things, 2):
        dx, dy = abs(a.x - b.x), abs(a.y - b.y)
        if SAME <= dx < CLEAR or (dx < SAME and dy < 0.15):
            return False
        gap = math.hypot(dx, dy) - a.radius - b.radius
        if gap < 0.02:
            touches += 1
            if -gap > 0.15 * 2 * min(a.radius, b.radius):
                return False
    return touches == int(touching)


def _in_reading_order(things):
    """Columns from left to right, each from top to bottom."""
    columns = []
    for thing in sorted(things, key=lambda thing: thing.x):
        if columns and thing.x - columns[-1][0].x < SAME:
            columns[-1].append(thing)
        else:
            columns.append([thing])
    return tuple(thing for column in columns for thing in sorted(column, key=lambda thing: thing.y))
