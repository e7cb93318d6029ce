"""Pictures of a short printed word or number in one of many fonts, and the questions about them."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont, ImageStat

from nanovlm.errors import MissingExtraError
from nanovlm.synthetic.drawing import draw
from nanovlm.synthetic.scene import BACKGROUNDS, Scene

READING_PROMPTS = ("What does it say?", "Read the text.", "What is written here?", "What does the sign say?")
NO_TEXT = "nothing"  # the answer to READING_PROMPTS about a scene

# Fonts by the package whose files they are; all of them are in the extra `fonts`. None is Pillow's own font.
TRAINED_FONTS = {
    None: (None,),
    "matplotlib": (
        *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold"),
        *("DejaVuSerif", "DejaVuSerif-Bold", "STIXGeneral", "STIXGeneralBol"),
    ),
    "font_roboto": ("Roboto-Regular", "Roboto-Medium", "Roboto-Bold", "Roboto-Italic"),
    "font_source_sans_pro": ("SourceSansPro-Regular", "SourceSansPro-Bold", "SourceSansPro-It"),
    "font_source_serif_pro": ("SourceSerifPro-Regular", "SourceSerifPro-Bold", "SourceSerifPro-It"),
    "font_fredoka_one": ("FredokaOne-Regular",),
}
UNSEEN_FONTS = {  # never drawn in training
    "font_caladea": ("Caladea-Regular", "Caladea-Bold"),
    "font_hanken_grotesk": ("HankenGrotesk-Regular", "HankenGrotesk-Bold"),
    "font_manrope": ("Manrope-Regular", "Manrope-Bold"),
}

Font = Path | None

_UPPER, _LOWER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
_SAME_IN_BOTH_CASES = set("ciklopsuvwxz")  # alone they do not tell upper from lower case
_MIN_CHARACTER = 0.09  # least average width of a character, as a fraction of the image's width
_HEIGHTS = (0.11, 0.5)  # range of the text's height, as a fraction of the image's


@dataclass(frozen=True)
class PrintedText:
    """A text in a font on a background, and the seed of the drawing's details."""

    text: str
    font: Font
    background: str
    seed: int


def find_fonts(families: dict[str | None, tuple[str | None, ...]] | dict[str, tuple[str, ...]]) -> list[Font]:
    """The files of TRAINED_FONTS or UNSEEN_FONTS; MissingExtraError if a package is not installed."""
    return [_find_font(package, name) for package, names in families.items() for name in names]


def _find_font(package: str | None, name: str | None) -> Font:
    if package is None:
        return None
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(f"the font {name} needs the extra fonts: pip install 'nanovlm[fonts]'")
    files = (path for folder in spec.submodule_search_locations for path in Path(folder).rglob(f"{name}.[ot]tf"))
    return sorted(files)[0]


def random_text(rng: Random, fonts: Sequence[Font]) -> PrintedText:
    """Two to six letters or digits, in a random font and on a random background."""
    return PrintedText(_random_string(rng), rng.choice(fonts), rng.choice(BACKGROUNDS), rng.getrandbits(32))


def _random_string(rng: Random) -> str:
    """Capitals, digits, small letters, or small letters after a capital; half of all letters in syllables."""
    length = rng.randint(2, 6)
    style = rng.choices(("upper", "digits", "lower", "title"), (4, 3, 3, 1))[0]
    if style == "digits":
        return "".join(rng.choices("0123456789", k=length))
    if rng.random() < 0.5:
        text = "".join(rng.choices(_LOWER, k=length))
    else:
        vowel = rng.random() < 0.5
        text = "".join(rng.choice("aeiou" if (i + vowel) % 2 else "bcdfghjklmnprstvwyz") for i in range(length))
    if set(text) <= _SAME_IN_BOTH_CASES:
        return _random_string(rng)
    return {"upper": text.upper(), "lower": text, "title": text.capitalize()}[style]


def text_caption(printed: PrintedText) -> str:
    """The caption of a picture of text."""
    return f'The text "{printed.text}" on a {printed.background} background.'


def draw_text(printed: PrintedText, width: int = 192, height: int = 192) -> Image.Image:
    """The text as an RGB image of width x height pixels: dark on a bright background, or bright on a dark one."""
    rng = Random(printed.seed)
    image = draw(Scene((), printed.background, rng.getrandbits(32)), width, height)
    mask = _text_mask(printed, rng, width, height)
    left, top = (rng.randint(0, max(0, side - own)) for side, own in zip(image.size, mask.size))
    low, high = (0, 90) if ImageStat.Stat(image.convert("L")).mean[0] > 128 else (175, 255)
    image.paste((rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)), (left, top), mask)
    return image


def _text_mask(printed: PrintedText, rng: Random, width: int, height: int) -> Image.Image:
    """The text in white on black, slightly turned, on a canvas that fits it and the image."""
    left, top, right, bottom = _font(printed.font, 100).getbbox(printed.text)
    wide = rng.uniform(max(0.4, _MIN_CHARACTER * len(printed.text)), 0.9) * width / (right - left)
    low, high = (fraction * height / (bottom - top) for fraction in _HEIGHTS)
    scale = min(max(min(wide, high), low), 0.92 * width / (right - left))
    font = _font(printed.font, max(8, round(100 * scale)))
    left, top, right, bottom = (round(value) for value in font.getbbox(printed.text))
    mask = Image.new("L", (right - left + 2, bottom - top + 2))
    ImageDraw.Draw(mask).text((1 - left, 1 - top), printed.text, fill=255, font=font)
    room = math.degrees(math.atan2(width - mask.width, max(mask.size)))  # before a turned text leaves the image
    angle = min(4.0, max(0.0, room))
    return mask.rotate(rng.uniform(-angle, angle), Image.Resampling.BICUBIC, expand=True)


@lru_cache(maxsize=512)
def _font(path: Font, size: int) -> ImageFont.FreeTypeFont:
    if path is None:
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont), "Pillow is built with FreeType"
        return font
    return ImageFont.truetype(path, size)
