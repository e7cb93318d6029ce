"""What fine-tuning on one's own images gives: the embedded model learns postcards, a drawn domain new to it.

    python -m eval.finetune --seed 2

The command writes 200 postcards with captions to an ordinary folder and runs `train.py --data FOLDER` on it in three
ways: all weights, LoRA adapters only, and all weights with scenes mixed in, so that the original domain is kept. Shares
are of captions that match word for word, greedy, on fresh images of both domains. The command fails if a limit is
missed: three minutes each, 90% of postcards (85% with adapters; none before training), and 80% of scenes where they
were mixed in.

    python -m eval.finetune --profile --model-size 222M --dtype bfloat16
    python -m eval.finetune --baseline trl --minutes 1
    python -m eval.finetune --baseline nanovlm --nanovlm ../nanoVLM --model-size 222M --steps 5

measure speed instead. --profile prints the share of each stage in a training step. --baseline fine-tunes on the same
postcards with another training loop, in turns with this one: upstream nanoVLM's from a checkout of its repository, or
trl's SFTTrainer on the exported model (extra trl). Both have the same model, batch size, number format and peak
learning rate, and otherwise their own defaults. Shapes other than the embedded model have random weights.

    python -m eval.finetune --study ARCHIVES

compares the defaults of train.py with other settings and simple classifiers on six data sets that this project does not
draw (hours); `eval.lib.study_sets` says what the folder of archives holds. With --baseline both loops run on each.
"""

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch

from eval.captions import BATCH_SIZE
from eval.lib.command import add_threads_flag, make_parser, one_of, positive, progress, report
from eval.lib.finetune_study import WAYS, race_study, study
from eval.lib.hardware import environment
from eval.lib.postcards import draw, random_postcard, write_folder
from eval.lib.scene_splits import png
from eval.lib.tables import table
from eval.lib.training_profile import profile_training
from eval.lib.training_race import EMBEDDED_SHAPE, TRAINED_SHAPES, MakeRun, OurRun, TrainingSetup, race, race_table
from eval.peers.training_peers import NanoVLMRun, TrlRun, check_nanovlm
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner, ImageInput
from nanovlm.cli.main import Parser, run_verb
from nanovlm.console import print_error
from nanovlm.device import choose_device, choose_training_dtype
from nanovlm.errors import NanoVLMError, TrainingError
from nanovlm.synthetic import caption, random_scene
from nanovlm.training.config import FINETUNING

MAX_MINUTES = 3
REPLAY = ["scenes@0.22", "--pack", "256", "--max-steps", "1050"]  # packed, since scenes are longer than postcards
TRAIN_FLAGS = {"all weights": [], "adapters": ["--lora-rank", "16"], "scenes mixed in": REPLAY}
MIN_SHARES = {"all weights": (0.9, 0.0), "adapters": (0.85, 0.0), "scenes mixed in": (0.9, 0.8)}  # postcards, scenes

PROFILED_STEPS, RACED_STEPS = 5, 5  # by default, beside a step that warms up


@dataclass(frozen=True)
class Result:
    """A way to fine-tune: its seconds, and the shares of right captions on fresh images of both domains."""

    way: str
    seconds: float
    postcards: float
    scenes: float

    @property
    def failures(self) -> list[str]:
        failures = []
        if self.seconds > 60 * MAX_MINUTES:
            failures.append(f"{self.way}: {self.seconds:.0f} s are more than {MAX_MINUTES} minutes")
        shares = {"postcards": self.postcards, "scenes": self.scenes}
        for (domain, share), minimum in zip(shares.items(), MIN_SHARES[self.way]):
            if share < minimum:
                failures.append(f"{self.way}: {share:.1%} of {domain} are right, less than {minimum:.0%}")
        return failures


Domain = tuple[list[ImageInput], list[str]]  # images and their captions


def make_domains(n: int, seed: str) -> list[Domain]:
    """n fresh postcards and n fresh scenes."""
    rng = Random(f"fresh {seed}")
    cards, scenes = [random_postcard(rng) for _ in range(n)], [random_scene(rng) for _ in range(n)]
    return [
        ([draw(card) for card in cards], [card.caption for card in cards]),
        ([png(scene, rng) for scene in scenes], [caption(scene) for scene in scenes]),
    ]


def measure_shares(folder: Path, domains: list[Domain]) -> list[float]:
    """The share of each domain's captions that the model in folder gives word for word."""
    captioner = Captioner.from_pretrained(folder, dtype="float32")
    shares = []
    for images, truths in domains:
        answers = captioner.captions(images, batch_size=BATCH_SIZE)
        shares.append(sum(answer == truth for answer, truth in zip(answers, truths)) / len(truths))
    return shares


def train(way: str, data: Path, flags: Sequence[str], domains: list[Domain]) -> Result:
    """Run train.py with TRAIN_FLAGS of this way and further flags, then measure. Raises TrainingError if it fails."""
    out = data.parent / way.replace(" ", "-")
    argv = ["--data", str(data), *TRAIN_FLAGS[way], "--validation", "0", "--out", str(out), *flags]
    progress(f"{way}: train.py {' '.join(argv)}")
    started = time.perf_counter()
    if code := run_verb("train", argv):
        raise TrainingError(f"{way}: train.py ended with exit code {code}")
    seconds = time.perf_counter() - started
    return Result(way, round(seconds, 1), *measure_shares(out, domains))


def shares_table(before: list[float], results: Sequence[Result]) -> str:
    rows = [["", "postcards", "scenes", "seconds"], ["before", *(f"{share:.1%}" for share in before), ""]]
    return table(rows + [[r.way, f"{r.postcards:.1%}", f"{r.scenes:.1%}", f"{r.seconds:.0f}"] for r in results])


def measure_limits(args: Namespace) -> int:
    """Fine-tune in each of the ways, and check the limits."""
    domains, rng = make_domains(args.fresh, args.seed), Random(f"learned {args.seed}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "postcards")
        write_folder(folder, [random_postcard(rng) for _ in range(args.images)])
        before = measure_shares(EMBEDDED, domains)
        results = [train(way, folder, args.flags.split(), domains) for way in args.ways or TRAIN_FLAGS]
    device = choose_device("auto")
    where = environment(device, choose_training_dtype("auto", device))
    failures = [failure for result in results for failure in result.failures]
    if before[0]:
        failures.append(f"before: {before[0]:.1%} of postcards are right, so the domain is not new")
    data = {"before": dict(zip(("postcards", "scenes"), before)), "learned": [asdict(result) for result in results]}
    return report(data, shares_table(before, results), where, args.json, failures)


def measure_study(args: Namespace) -> int:
    """The default and other settings, or two training loops, on every data set of the study."""
    if args.baseline:
        settings = {"dtype": args.dtype, "batch_size": args.batch_size}
        results = race_study(args.study, training_loops(args), 60 * args.minutes, settings)
    else:
        results = study(args.study, args.ways, args.flags.split())
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    rows = [["", *names]]
    for data, found in results.items():
        rows.append([data, *(f"{found[name]['exact']:.1%}" if name in found else "" for name in names)])
    return report(results, table(rows), environment("cpu"), args.json)


def training_loops(args: Namespace) -> dict[str, MakeRun]:
    """This project's and that of --baseline."""
    other = TrlRun if args.baseline == "trl" else partial(NanoVLMRun, checkout=check_nanovlm(args.nanovlm))
    return {"this project": OurRun, args.baseline: other}


def measure_speed(args: Namespace) -> int:
    """The stages of a training step, or two training loops in turns."""
    makers = {} if args.profile else training_loops(args)
    with tempfile.TemporaryDirectory() as temporary:
        folder, settings = Path(temporary), {"dtype": args.dtype, "batch_size": args.batch_size}
        setup = TrainingSetup.make(folder, args.model_size, args.images, args.seed, **settings)
        where = environment("cpu", choose_training_dtype(args.dtype, torch.device("cpu")))
        if args.profile:
            seconds, text = profile_training(setup, folder / "profile", args.steps or PROFILED_STEPS)
            return report(seconds, text, where, args.json)
        learns = args.model_size == EMBEDDED_SHAPE and args.steps is None
        steps = args.steps or (None if learns else RACED_STEPS)
        results, runs = race(setup, makers, folder, steps, 60 * args.minutes)
        if learns:
            postcards = make_domains(args.fresh, args.seed)[:1]
            for result, run in zip(results, runs):
                (result.exact,) = measure_shares(run.save(), postcards)
        return report({result.name: result.as_dict() for result in results}, race_table(results), where, args.json)


def make_finetune_parser() -> Parser:
    parser = make_parser("finetune", __doc__)
    add = parser.add_argument
    ways = f"any of {', '.join(map(repr, TRAIN_FLAGS))}, with --study of {', '.join(map(repr, WAYS))} (default: all)"
    add("ways", nargs="*", type=one_of(TRAIN_FLAGS | WAYS), metavar="WAY", help=ways)
    add("--study", type=Path, metavar="ARCHIVES", help="compare the defaults on six data sets, from this folder")
    add("--images", type=positive, default=200, metavar="N", help="to learn from (default: 200)")
    add("--fresh", type=positive, default=400, metavar="N", help="test images a domain (default: 400)")
    add("--seed", default="1", help="which images (default: 1)")
    add("--flags", default="", metavar="'--max-steps N ...'", help="further flags of train.py")
    add("--profile", action="store_true", help="print the share of each stage in a training step on the CPU")
    add("--baseline", choices=("nanovlm", "trl"), help="compare with another training loop on the CPU")
    add("--nanovlm", type=Path, metavar="PATH", help="a checkout of huggingface/nanoVLM, for --baseline nanovlm")
    add("--model-size", choices=TRAINED_SHAPES, default=EMBEDDED_SHAPE, help=f"model (default: {EMBEDDED_SHAPE})")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="as of train.py (default: auto)")
    add("--batch-size", type=positive, default=FINETUNING.batch_size, metavar="N", help="(default: %(default)s)")
    add("--steps", type=positive, metavar="N", help="steps to measure, instead of --minutes")
    add("--minutes", type=float, default=1.0, help="of training with each loop of --baseline (default: 1)")
    add_threads_flag(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_finetune_parser()
    args = parser.parse_args(argv)
    if args.profile and args.baseline:
        parser.error("--profile and --baseline exclude each other")
    if args.study and not args.study.is_dir():
        parser.error(f"--study {args.study} is no folder; see the docstring of eval/lib/study_sets.py")
    try:
        if args.study:
            return measure_study(args)
        return measure_speed(args) if args.profile or args.baseline else measure_limits(args)
    except NanoVLMError as error:
        print_error(f"{parser.prog}: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
