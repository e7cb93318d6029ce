"""Pictures of printed text, to measure how well a model reads: random strings in fonts that training drew, and others.

Only the fonts are those of nanovlm/synthetic/words.py. Strings, sizes, inks and papers are drawn by code of their own.
Strings that a reader cannot tell apart are left out: single digits or letters like O and 0, or C and c.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from eval.lib.scene_splits import CHARACTER_ROWS, count_by_row
from nanovlm.captioner import Captioner
from nanovlm.synthetic.words import TRAINED_FONTS, UNSEEN_FONTS, Font, find_fonts

PROMPT = "What does it say?"
Families = dict[str | None, tuple[str | None, ...]] | dict[str, tuple[str, ...]]  # packages and names of their fonts
UNSEEN: dict[str, tuple[str, ...]] = {**UNSEEN_FONTS}
SPLITS: dict[str, Families] = {"trained fonts": TRAINED_FONTS, "unseen fonts": UNSEEN}
IMAGE_SIZES = (96, 256)  # pixels
ROWS = ("kind", "length", "ink", "font")  # what the results are counted by
MAX_LENGTH = 6  # characters
MARGIN = 0.03  # kept free along each side, of that side
MAX_WIDTH, MAX_HEIGHT = 0.9, 0.45  # of the text, as shares of the image's
MIN_CHARACTER = 0.1  # least mean width of a character, as a share of the image's
MIN_HEIGHT = 0.06  # of the text, as a share of the image's: 5 pixels in an image of 96 pixels
LIGHT, DARK = (205, 255), (0, 80)  # of each channel of a paper and an ink, or the other way round
SAME_IN_BOTH_CASES = frozenset("ciklopsuvwxyz01")  # alone they do not tell capitals, small letters and digits apart

_COMMON_WORDS = (
    "able about add age air also and angle apple arm art ask baby back bad bag ball bank bean bear bed bell best "
    "big bird black blue boat body bone book bread bring brown bus cake call camp car card care cat chair child "
    "city clean clock cold corn cut dance dark day deep desk dish dog door down dream dress drink dry duck ear "
    "early earth east eat edge egg empty end even eye face fact fall farm fast father few field fight find fire "
    "fish five flag floor flower fly food foot free friend frog front full game garden gift girl give glass goat "
    "gold good grass great green hair half hand happy hard hat head heart heat help hen high hill home honey horse "
    "hot house ice idea inch jam job juice jump keep key king kite ladder lake lamp land large last laugh leaf "
    "learn left leg lemon letter light lion list live long lunch map market meal meat metal milk minute mirror "
    "money month moon mother mouse music nail name near neck nest new night nine noise nose number nut ocean offer "
    "one open orange paint pan paper park part party pen people phone pick pie pig place plane plant plate play "
    "point potato queen quick quiet rabbit rain read red rice right ring river road roof room rope round salt sand "
    "school sea seat seed seven shape sharp sheep sheet ship shirt shoe shop short sing six sleep small smile snow "
    "soap soft son song soup spoon spring square stairs star stone story street sugar summer sun sweet table tail "
    "tall tea ten test thank think three tiger time toe tomato town toy train travel tree truck turn uncle under "
    "use van voice wait walk wall warm wash watch water way week west wheel white wind winter wood word work year "
    "yellow young zebra"
)
WORDS = tuple(_COMMON_WORDS.split())
_CAPITALS, _DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
_CODE = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"  # without what looks alike: O and 0, I and 1
STRINGS: dict[str, Callable[[Random, int], str]] = {  # (rng, length) -> a string
    "capitals": lambda rng, length: "".join(rng.choices(_CAPITALS, k=length)),
    "numbers": lambda rng, length: "".join(rng.choices(_DIGITS, k=length)),
    "capitals and digits": lambda rng, length: "".join(rng.choices(_CODE, k=length)),
    "small words": lambda rng, length: rng.choice(WORDS),
}


@dataclass(frozen=True)
class WordExample:
    """A picture of text as a PNG file, the text, and the row that it counts in, for each of ROWS."""

    image: bytes
    truth: str
    rows: dict[str, str]


def make_word_splits(n: int, seed: str) -> dict[str, list[WordExample]]:
    """n pictures in the fonts of the training and n in unseen ones. Raises MissingExtraError without the fonts."""
    rng = Random(f"words {seed}")
    return {
        split: [_random_example(rng, fonts) for _ in range(n)]
        for split, fonts in {split: find_fonts(families) for split, families in SPLITS.items()}.items()
    }


def measure_words(captioner: Captioner, n: int, seed: str, batch_size: int) -> dict[str, dict]:
    """Exact matches of n pictures of each split and of its rows, and every miss as (split, font, truth, answer)."""
    results: dict = {}
    misses = []
    for split, examples in make_word_splits(n, seed).items():
        answers = list(captioner.captions([example.image for example in examples], PROMPT, batch_size=batch_size))
        right = [answer == example.truth for example, answer in zip(examples, answers)]
        rows = {by: count_by_row([example.rows[by] for example in examples], right) for by in ROWS}
        results[split] = {"right": sum(right), "of": n, "rows": rows}
        for example, answer, is_right in zip(examples, answers, right):
            if not is_right:
                misses.append((split, example.rows["font"], example.truth, answer))
    return results | {"missed": misses}


def _random_example(rng: Random, fonts: list[Font]) -> WordExample:
    kind = rng.choice(tuple(STRINGS))
    text, font, light_on_dark = random_string(rng, kind), rng.choice(fonts), rng.random() < 0.5
    width = rng.randint(*IMAGE_SIZES)
    height = min(IMAGE_SIZES[1], max(IMAGE_SIZES[0], round(width * rng.uniform(0.75, 1.33))))
    file = io.BytesIO()
    draw_word(text, font, width, height, rng, light_on_dark).save(file, "png")
    rows = {
        "kind": kind,
        "length": CHARACTER_ROWS[len(text) - 1],
        "ink": "light on dark" if light_on_dark else "dark on light",
        "font": "Aileron" if font is None else font.stem,
    }
    return WordExample(file.getvalue(), text, rows)


def random_string(rng: Random, kind: str) -> str:
    """One to MAX_LENGTH characters of a kind of STRINGS that a reader can name without doubt."""
    while True:
        text = STRINGS[kind](rng, rng.randint(1, MAX_LENGTH))
        if not set(text.lower()) <= SAME_IN_BOTH_CASES:
            return text


def draw_word(text: str, font: Font, width: int, height: int, rng: Random, light_on_dark: bool) -> Image.Image:
    """The text as an RGB image of width x height pixels, on plain, grainy or shaded paper."""
    paper_range, ink_range = (DARK, LIGHT) if light_on_dark else (LIGHT, DARK)
    paper = np.full((height, width, 3), [rng.randint(*paper_range) for _ in range(3)], float)
    texture = rng.choice(("plain", "grainy", "shaded"))
    if texture == "grainy":
        grains = np.random.default_rng(rng.getrandbits(32)).normal(0, 6, (height, width, 1))
        paper += grains
    elif texture == "shaded":
        paper += rng.uniform(-15, 15) * np.linspace(-1, 1, width)[None, :, None]
        paper += rng.uniform(-15, 15) * np.linspace(-1, 1, height)[:, None, None]
    image = Image.fromarray(np.clip(np.rint(paper), 0, 255).astype(np.uint8))
    size, position = layout(text, font, width, height, rng)
    red, green, blue = (rng.randint(*ink_range) for _ in range(3))
    ImageDraw.Draw(image).text(position, text, fill=(red, green, blue), font=load_font(font, size))
    return image


def layout(text: str, font: Font, width: int, height: int, rng: Random) -> tuple[int, tuple[int, int]]:
    """A font size, and a position at which the text lies inside the image's margins."""
    left, top, right, bottom = load_font(font, 100).getbbox(text)
    share = rng.uniform(max(0.3, MIN_CHARACTER * len(text)), MAX_WIDTH)
    wide, low, high = (
        share * width / (right - left),
        MIN_HEIGHT * height / (bottom - top),
        MAX_HEIGHT * height / (bottom - top),
    )
    size = int(100 * min(max(wide, low), high, MAX_WIDTH * width / (right - left)))
    left, top, right, bottom = load_font(font, size).getbbox(text)
    x, y = (
        rng.uniform(MARGIN * side, max(MARGIN * side, (1 - MARGIN) * side - own))
        for side, own in ((width, right - left), (height, bottom - top))
    )
    return size, (round(x - left), round(y - top))


@lru_cache(maxsize=512)
def load_font(font: Font, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size) if font is None else ImageFont.truetype(font, size)
