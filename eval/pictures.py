"""How long a picture takes until the first word, beside nanoVLM's way of computing it, and what saves reading it again.

    python -m eval.pictures               # the shapes 230M and 460M, about six minutes on 2 CPU cores
    python -m eval.pictures 230M --rounds 5

Models of the published shapes with random weights read a picture of one tile (512 x 512 pixels) and one of 16 tiles
and a global view (2048 x 2048). "plain" is nanoVLM's way, float32 and each layer as PyTorch computes it; "here" is what
`Captioner.from_pretrained` gives by default. Then eight questions are asked about one picture, by eight calls and by
one `Captioner.ask`, and generate.py is started cold beside a process that only imports torch and torchvision. The sides
take turns, so that a busy machine slows both; figures are medians.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from PIL import Image
from torch import nn

from eval.lib.command import make_parser, one_of, positive, progress, report
from eval.lib.hardware import environment
from eval.lib.random_model import write_random_model
from eval.lib.shapes import SHAPES
from models.config import VLMConfig
from models.inference.cpu_kernels import use_onednn
from models.inference.fused_vision import use_fused
from nanovlm import SAMPLE
from nanovlm.captioner import Captioner, ImageInput, Stats
from nanovlm.synthetic import draw, random_scene

ROOT = Path(__file__).parent.parent
NAMES = ("230M", "460M")
SIDES = (512, 2048)  # pixels
COLD = {
    "import torch, torchvision": [sys.executable, "-c", "import torch, torchvision"],
    "generate.py": [sys.executable, str(ROOT / "generate.py")],
}
QUESTIONS = [
    "How many objects are there?", "What is the background like?", "Is there a red ring?", "Is there a yellow heart?",
    "How many circles are there?", "How many blue objects are there?", "Is there a star?", "What is in the middle?",
]  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Two ways to the same end; medians in seconds."""

    what: str
    stage: str
    before_s: float
    here_s: float

    @property
    def times(self) -> float:
        return self.before_s / self.here_s


Way = Callable[[], dict[str, float]]  # seconds of one or several stages


def turns(what: str, before: Way, here: Way, rounds: int) -> list[Comparison]:
    """Both in turn: a comparison for each stage that they tell of."""
    progress(what)
    sides = list(zip(*((before(), here()) for _ in range(rounds))))
    return [Comparison(what, stage, *(median(one[stage] for one in side) for side in sides)) for stage in sides[0][0]]


@contextmanager
def timed(module: nn.Module) -> Iterator[list[float]]:
    """`with timed(module) as seconds:` how long each of its calls took."""
    started, seconds = [], []
    hooks = [
        module.register_forward_pre_hook(lambda *_: started.append(time.perf_counter())),
        module.register_forward_hook(lambda *_: seconds.append(time.perf_counter() - started[-1])),
    ]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def first_token(captioner: Captioner, picture: ImageInput) -> dict[str, float]:
    """Seconds to an answer's first token, and those of the vision encoder and of the language model in it."""
    stats = Stats()
    with timed(captioner.model.vision_encoder) as encode, timed(captioner.model.decoder) as prefill:
        captioner.samples(picture, max_new_tokens=1, stats=stats)
    return {"encode": sum(encode), "prefill": sum(prefill), "first token": stats.first_token_s}


def eight_calls(captioner: Captioner, picture: ImageInput, max_new_tokens: int) -> dict[str, float]:
    started = time.perf_counter()
    for question in QUESTIONS:
        captioner.caption(picture, question, max_new_tokens=max_new_tokens)
    return {"eight questions": time.perf_counter() - started}


def one_ask(captioner: Captioner, picture: ImageInput, max_new_tokens: int) -> dict[str, float]:
    started = time.perf_counter()
    captioner.ask(picture, QUESTIONS, max_new_tokens=max_new_tokens)
    return {"eight questions": time.perf_counter() - started}


def cold(program: list[str]) -> dict[str, float]:
    """Seconds of a whole process."""
    started = time.perf_counter()
    subprocess.run(program, check=True, capture_output=True)
    return {"cold start": time.perf_counter() - started}


def picture_of(side: int) -> Image.Image:
    return draw(random_scene(Random("pictures")), side, side)


def shape(name: str, cfg: VLMConfig, sides: tuple[int, ...], rounds: int) -> list[Comparison]:
    """A model of that shape, plain and as it is used, on a picture of each size; then its questions."""
    with tempfile.TemporaryDirectory() as folder:
        progress(f"{name}: writing random weights")
        write_random_model(Path(folder), cfg)
        here = Captioner.from_pretrained(folder)
        plain = Captioner.from_pretrained(folder, "cpu", "float32")
        use_fused(use_onednn(plain.model, on=False), on=False)
        found = []
        for side in sides:
            picture, stats = picture_of(side), Stats()
            here.samples(picture, max_new_tokens=1, stats=stats)
            what = f"{name}, {side} px, {stats.prompt_tokens:,} tokens"
            found += turns(what, *(partial(first_token, captioner, picture) for captioner in (plain, here)), rounds)
        return found + questions(f"{name}, {sides[0]} px, 16 tokens each", here, picture_of(sides[0]), 16, rounds)


def questions(what: str, captioner: Captioner, picture: ImageInput, most: int, rounds: int) -> list[Comparison]:
    return turns(what, *(partial(way, captioner, picture, most) for way in (eight_calls, one_ask)), rounds)


def table(found: list[Comparison]) -> str:
    wide = max(len(one.what) for one in found)
    row = f"{{:{wide}}}  {{:15}}  {{:>10}}  {{:>10}}  {{:>6}}".format
    lines = [row("", "", "plain", "here", "times")]
    for one in found:
        seconds = [f"{1000 * s:,.0f} ms" for s in (one.before_s, one.here_s)]
        lines.append(row(one.what, one.stage, *seconds, f"{one.times:.2f}x"))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("pictures", __doc__)
    known = f"any of {', '.join(SHAPES)} ({', '.join(NAMES)})"
    parser.add_argument("names", nargs="*", type=one_of(SHAPES), metavar="NAME", help=known)
    parser.add_argument("--sides", nargs="+", type=positive, default=SIDES, metavar="N", help="pixels of the pictures")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="turns of each side (3)")
    args = parser.parse_args(argv)

    found = []
    for name in args.names or NAMES:
        cfg = SHAPES[name][0]
        tiles = {} if cfg.max_img_size is None else {"max_img_size": max(SIDES)}
        found += shape(name, replace(cfg, **tiles), tuple(args.sides), args.rounds)
    embedded = Captioner.from_pretrained()
    found += questions("embedded model, sample.png", embedded, SAMPLE, 32, 3 * args.rounds)
    found += turns(" and ".join(COLD), *(partial(cold, program) for program in COLD.values()), 3 * args.rounds)
    where = f"{environment(dtype=embedded.model.dtype)}; medians of {args.rounds} rounds"
    told = [asdict(one) | {"times": one.times} for one in found]
    return report({"comparisons": told}, table(found), where, args.json)


if __name__ == "__main__":
    sys.exit(main())
