"""A second renderer of `nanovlm.synthetic` scenes, to measure the embedded model on images that training did not draw.

It writes a scene as SVG for resvg (extra eval), shares no code with nanovlm/synthetic/drawing.py and reads only a
scene's values: which shape is where, its named color and its size, and the kind of background. Its geometry, colors,
backgrounds and styles are its own: thin and thick crosses, wide and thin rings, hearts of two kinds, blunt and sharp
stars, narrow and wide diamonds, rounded squares. The image's shorter side is 100 units long.
"""

import io
import math
from random import Random

from PIL import Image

from nanovlm.errors import MissingExtraError
from nanovlm.synthetic import COLORS, Scene, Shape

RGB = tuple[int, int, int]

COLOR_SPREAD = 12  # of each channel around the named color
RIM = 0.45  # brightness of a rim; that of orange at 0.6 would be brown
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
FILL = 'fill="url(#b)"'
BACKGROUND = """<rect width="100%" height="100%" fill="{}"/><rect width="100%" height="100%" {}/>"""


def draw(scene: Scene, width: int = 192, height: int = 192) -> Image.Image:
    """The scene as an RGB image of width x height pixels; the same one for the same arguments."""
    rng = Random(f"svg {scene.seed}")
    bright, dim = rng.choice(TONES)
    if scene.background == "glowing" or rng.random() < 0.5:  # what glows is bright in the middle
        bright, dim = dim, bright
    across, down = (100 * side / min(width, height) for side in (width, height))
    defs, fill = background(scene.background, dim, rng)
    shapes = "".join(draw_shape(shape, shape.x * across, shape.y * down, rng) for shape in scene.shapes)
    svg = f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {across} {down}">
<defs>{defs}</defs>{BACKGROUND.format(css(bright), fill)}{shapes}</svg>"""
    return rasterize(svg).convert("RGB")


def rasterize(svg: str, width: int | None = None) -> Image.Image:
    """The image of an SVG document, of its own width or another one."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise MissingExtraError("SVG needs resvg: pip install 'nanovlm[eval]'") from None
    return Image.open(io.BytesIO(bytes(svg_to_bytes(svg_string=svg, width=width))))


def css(rgb: RGB, brightness: float = 1.0) -> str:
    return f"rgb({','.join(str(min(255, max(0, round(brightness * c)))) for c in rgb)})"


def draw_shape(shape: Shape, x: float, y: float, rng: Random) -> str:
    """A shape around (x, y), flat, with a darker rim, or lit from above with a faint shadow."""
    red, green, blue = (c + rng.randint(-COLOR_SPREAD, COLOR_SPREAD) for c in COLORS[shape.color])
    rgb, path, radius = (red, green, blue), outline(shape.kind, rng), 100 * shape.radius
    style = rng.choice(("flat", "flat", "rimmed", "lit"))

    def placed(fill: str, shift: float = 0.0) -> str:
        place = f"translate({x + shift} {y + shift}) rotate({shape.angle}) scale({radius})"
        return f'<path d="{path}" transform="{place}" fill-rule="evenodd" {fill}/>'

    if style == "lit":
        name = f"light{rng.getrandbits(32)}"
        stops = f'<stop stop-color="{css(rgb, 1.06)}"/><stop offset="1" stop-color="{css(rgb, 0.94)}"/>'
        light = f'<linearGradient id="{name}" x2="0" y2="1">{stops}</linearGradient>'
        return light + placed('fill-opacity="0.25"', 0.07 * radius) + placed(f'fill="url(#{name})"')
    rim = f'stroke="{css(rgb, RIM)}" stroke-width="0.1"' if style == "rimmed" else ""
    return placed(f'fill="{css(rgb)}" {rim}')


def outline(kind: str, rng: Random) -> str:
    """The path of a shape of this kind around (0, 0), y downwards, its radius as unit, with random proportions."""
    pick = rng.uniform
    if kind == "circle":
        radius = pick(0.9, 1)
        return f"M{radius} 0{_arcs(radius)}"
    if kind == "ring":
        hole = pick(0.4, 0.8)
        return f"M1 0{_arcs(1)}M{hole} 0{_arcs(hole)}"
    if kind == "square":
        half, corner = pick(0.76, 0.86), pick(0, 0.25)
        side, ends = 2 * (half - corner), ((1, 1), (-1, 1), (-1, -1), (1, -1))  # of the corners, clockwise
        lines = (f"h{side}", f"v{side}", f"h-{side}", f"v-{side}")
        arcs = (f"{line}a{corner} {corner} 0 0 1 {x * corner} {y * corner}" for line, (x, y) in zip(lines, ends))
        return f"M{corner - half} -{half}{''.join(arcs)}Z"
    if kind == "triangle":
        half = pick(0.68, 0.95)
        return f"M0 -0.95L{half} 0.65H-{half}Z"
    if kind == "diamond":
        half = pick(0.55, 0.95)
        return f"M0 -1L{half} 0L0 1L-{half} 0Z"
    if kind == "star":
        radii = (1.0, pick(0.35, 0.6))
        turns = [(radii[i % 2], math.pi * i / 5) for i in range(10)]
        return "M" + "L".join(f"{r * math.sin(t):.4f} {-r * math.cos(t):.4f}" for r, t in turns) + "Z"
    if kind == "cross":
        arm = pick(0.14, 0.42)
        return f"M-{arm} -1H{arm}V-{arm}H1V{arm}H{arm}V1H-{arm}V{arm}H-1V-{arm}H-{arm}Z"
    notch = -pick(0.3, 0.6)
    if rng.random() < 0.5:  # arcs and straight sides, or curves
        return f"M0 0.95L-0.88 0A0.54 0.54 0 0 1 0 {notch}A0.54 0.54 0 0 1 0.88 0Z"
    return (
        f"M0 0.95C-1.45 0.1 -1.05 -0.95 -0.5 -0.9Q-0.1 -0.85 0 {notch}Q0.1 -0.85 0.5 -0.9C1.05 -0.95 1.45 0.1 0 0.95Z"
    )


def _arcs(radius: float) -> str:
    """A circle, from its rightmost point."""
    return f"a{radius} {radius} 0 0 0 -{2 * radius} 0a{radius} {radius} 0 0 0 {2 * radius} 0Z"


def background(kind: str, rgb: RGB, rng: Random) -> tuple[str, str]:
    """Definitions, and the attributes of a rectangle that paints this kind's second tone."""
    pick, stop = rng.uniform, f'<stop stop-color="{css(rgb)}"'
    if kind == "plain":
        return "", 'fill="none"'
    if kind == "gradient":
        turn = f'gradientTransform="rotate({pick(0, 360)} 0.5 0.5)"'
        return f'<linearGradient id="b" {turn}>{stop} stop-opacity="0"/>{stop} offset="1"/></linearGradient>', FILL
    if kind == "glowing":
        place = f'cx="{pick(0.35, 0.65)}" cy="{pick(0.35, 0.65)}" r="{pick(0.6, 0.8)}"'
        return f'<radialGradient id="b" {place}>{stop}/>{stop} offset="1" stop-opacity="0"/></radialGradient>', FILL
    if kind in ("noisy", "cloudy"):
        frequency, octaves = (pick(0.25, 0.4), 1) if kind == "noisy" else (pick(0.02, 0.03), 2)
        red, green, blue = (c / 255 for c in rgb)
        noise = f'type="fractalNoise" baseFrequency="{frequency}" numOctaves="{octaves}" seed="{rng.getrandbits(15)}"'
        values = f"0 0 0 0 {red} 0 0 0 0 {green} 0 0 0 0 {blue} 5 0 0 0 -2"  # alpha is the noise, with more contrast
        area = 'x="0" y="0" width="1" height="1" color-interpolation-filters="sRGB"'
        filters = f'<feTurbulence {noise}/><feColorMatrix values="{values}"/>'
        return f'<filter id="b" {area}>{filters}</filter>', 'filter="url(#b)"'
    width, height, path, stroke = PATTERNS[kind](rng)
    angle = {"striped": rng.choice((0, 45, 90, 135)) + pick(-8, 8), "wavy": rng.choice((0, 90))}.get(kind, 0)
    place = f'patternTransform="rotate({angle}) translate({pick(0, width)} {pick(0, height)})"'
    paint = f'fill="none" stroke="{css(rgb)}" stroke-width="{stroke}"' if stroke else f'fill="{css(rgb)}"'
    size = f'patternUnits="userSpaceOnUse" width="{width}" height="{height}"'
    return f'<pattern id="b" {size} {place}><path d="{path}" {paint}/></pattern>', FILL


# Patterns: the width and height of what is repeated, its path, and the width of the path's line, or 0 if it is filled

Pattern = tuple[float, float, str, float]


def striped(rng: Random) -> Pattern:
    step = rng.uniform(12, 20)
    return step, step, f"M0 0h{rng.uniform(0.4, 0.6) * step}v{step}H0Z", 0


def wavy(rng: Random) -> Pattern:
    step, swing, length = rng.uniform(13, 19), rng.uniform(3, 4.5), rng.uniform(25, 38)
    wave = f"q{length / 4} {2 * swing} {length / 2} 0" + f"t{length / 2} 0" * 5
    return length, step, "".join(f"M-{length} {(i + 0.5) * step}{wave}" for i in (-1, 0, 1)), step / 2


def checkered(rng: Random) -> Pattern:
    step = rng.uniform(8.5, 13)
    return 2 * step, 2 * step, f"M0 0h{step}v{2 * step}h{step}v-{step}H0Z", 0


def dotted(rng: Random) -> Pattern:
    """Round dots; every other row is shifted by half a step."""
    step = rng.uniform(10, 13)
    radius = rng.uniform(0.19, 0.25) * step
    centers = ((step / 2, step / 2), (0, 1.5 * step), (step, 1.5 * step))
    return step, 2 * step, "".join(f"M{x + radius} {y}{_arcs(radius)}" for x, y in centers), 0


def gridded(rng: Random) -> Pattern:
    step = rng.uniform(11, 16)
    return step, step, f"M0 {step / 2}h{step}M{step / 2} 0v{step}", rng.uniform(1.6, 2.4)


PATTERNS = {pattern.__name__: pattern for pattern in (striped, wavy, checkered, dotted, gridded)}
