"""What fine-tuning on one's own pictures gives: the embedded model learns postcards, a drawn world it has never seen.

    python -m eval.finetune --seed 2

200 pictures with their captions are written as an ordinary folder, and `train.py --data FOLDER` is run on it as it
comes: all weights, adapters alone, and with scenes mixed in, so that what the model knew stays. Shares are of captions
that match word for word, greedy, on fresh pictures of both worlds. It fails if a bar is missed: three minutes for each,
90% of the postcards (85% with adapters; none before), and 80% of the scenes where they were mixed in.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from eval.captions import png
from eval.lib.command import make_parser, one_of, positive, progress, report
from eval.lib.hardware import environment
from eval.lib.postcards import draw, random_postcard, write_folder
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner, Picture
from nanovlm.cli.main import run_verb
from nanovlm.device import choose_device, choose_training_dtype
from nanovlm.synthetic import caption, random_scene

MINUTES = 3
MIXED = ["scenes@0.22", "--pack", "256", "--steps", "1050"]  # packed, as scenes are longer; the time goes into steps
FLAGS = {"all weights": [], "adapters": ["--lora-rank", "16"], "scenes mixed in": MIXED}
LEAST = {"all weights": (0.9, 0), "adapters": (0.85, 0), "scenes mixed in": (0.9, 0.8)}  # of postcards, of scenes


@dataclass(frozen=True)
class Learned:
    """A way to learn: the seconds it took, and the shares of captions that are right."""

    way: str
    seconds: float
    postcards: float
    scenes: float

    @property
    def failures(self) -> list[str]:
        told = [f"{self.way}: {self.seconds:.0f} s are more than {MINUTES} minutes"] * (self.seconds > 60 * MINUTES)
        for world, share, least in zip(("postcards", "scenes"), (self.postcards, self.scenes), LEAST[self.way]):
            told += [f"{self.way}: {share:.1%} of {world} are right, less than {least:.0%}"] * (share < least)
        return told


Worlds = list[tuple[list[Picture], list[str]]]


def worlds(n: int, seed: str) -> Worlds:
    """n fresh pictures and their captions, of postcards and of scenes."""
    rng = Random(f"fresh {seed}")
    cards, scenes = [random_postcard(rng) for _ in range(n)], [random_scene(rng) for _ in range(n)]
    return [
        ([draw(card) for card in cards], [card.caption for card in cards]),
        ([png(scene, rng) for scene in scenes], [caption(scene) for scene in scenes]),
    ]


def shares(folder: Path, asked: Worlds) -> list[float]:
    """How many of each world's captions the model in folder says word for word."""
    captioner = Captioner.from_pretrained(folder, dtype="float32")
    return [
        sum(said == truth for said, truth in zip(captioner.captions(pictures, batch_size=64), truths)) / len(truths)
        for pictures, truths in asked
    ]


def learn(way: str, data: Path, flags: Sequence[str], asked: Worlds) -> Learned:
    """Train as FLAGS of this way and more flags say, through the door that a user opens, and ask."""
    own = FLAGS[way]
    out = data.parent / way.replace(" ", "-")
    argv = ["--data", str(data), *own, "--out", str(out), *flags]
    progress(f"{way}: train.py {' '.join(argv)}")
    started = time.perf_counter()
    if code := run_verb("train", argv):
        raise RuntimeError(f"{way}: train.py ended with exit code {code}")
    seconds = time.perf_counter() - started
    return Learned(way, round(seconds, 1), *shares(out, asked))


def table(before: list[float], results: Sequence[Learned]) -> str:
    row = "{:16} {:>10} {:>8} {:>9}".format
    lines = [row("", "postcards", "scenes", "seconds"), row("before", *(f"{share:.1%}" for share in before), "")]
    lines += [row(r.way, f"{r.postcards:.1%}", f"{r.scenes:.1%}", f"{r.seconds:.0f}") for r in results]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("finetune", __doc__)
    ways = f"any of {', '.join(map(repr, FLAGS))} (all)"
    parser.add_argument("ways", nargs="*", type=one_of(FLAGS), metavar="WAY", help=ways)
    parser.add_argument("--pictures", type=positive, default=200, metavar="N", help="to learn from (200)")
    parser.add_argument("--fresh", type=positive, default=400, metavar="N", help="to ask about, of each world (400)")
    parser.add_argument("--seed", default="1", help="which pictures (1)")
    parser.add_argument("--flags", default="", metavar="'--steps N ...'", help="more flags for train.py (none)")
    args = parser.parse_args(argv)

    asked, rng = worlds(args.fresh, args.seed), Random(f"learned {args.seed}")
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary, "postcards")
        write_folder(data, [random_postcard(rng) for _ in range(args.pictures)])
        before = shares(EMBEDDED, asked)
        try:
            results = [learn(way, data, args.flags.split(), asked) for way in args.ways or FLAGS]
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    device = choose_device("auto")
    where = environment(device, choose_training_dtype("auto", device))
    failures = [fault for result in results for fault in result.failures]
    if before[0]:
        failures.append(f"before: {before[0]:.1%} of postcards are right, so they are no new world")
    found = {"before": dict(zip(("postcards", "scenes"), before)), "learned": [asdict(r) for r in results]}
    return report(found, table(before, results), where, args.json, failures)


if __name__ == "__main__":
    sys.exit(main())
