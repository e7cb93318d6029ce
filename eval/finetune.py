"""What fine-tuning gives on small data sets of real images, and how fast its training steps are.

    python -m eval.finetune --study ARCHIVES

trains the embedded model on six data sets that this project does not draw, by `train.py` with its defaults and in other
ways, and prints the shares of test images whose answer is exactly right, beside those of simple classifiers (hours).
`eval.lib.study_sets` says what the folder of archives holds; without it the three data sets that come with packages are
used (extra eval). The way "scenes mixed in" also counts captions of drawn scenes, which the model knew before.

    python -m eval.finetune --sets patches --ways default --flags "--max-steps 900"

takes some of the data sets and ways. With --baseline two training loops, this project's and another's, have --minutes
each on every data set: upstream nanoVLM's from a checkout of its repository, or trl's SFTTrainer on the exported model
(extra trl). Both have the same model, batch size and number format, and otherwise their own defaults; the other loop
has AdamW, at the peak learning rate that this project takes with it.

    python -m eval.finetune --profile --model-size 222M --dtype bfloat16
    python -m eval.finetune --baseline nanovlm --nanovlm ../nanoVLM --model-size 222M --steps 5

measure speed on drawn scenes instead: the share of each stage in a training step, and both loops in turns. Shapes other
than the embedded model have random weights.
"""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from eval.lib.command import add_threads_flag, make_parser, positive, report, table
from eval.lib.finetune_study import WAYS, cell, race_study, study
from eval.lib.hardware import environment
from eval.lib.study_sets import STUDY_SETS, WITH_PACKAGES
from eval.lib.training_profile import profile_training
from eval.lib.training_race import EMBEDDED_SHAPE, TRAINED_SHAPES, MakeRun, OurRun, TrainingSetup, race, race_table
from eval.peers.training_peers import NanoVLMRun, TrlRun, check_nanovlm
from nanovlm.cli.main import Parser
from nanovlm.console import print_error
from nanovlm.device import choose_training_dtype, keep_freed_memory
from nanovlm.errors import NanoVLMError
from nanovlm.training.config import FINETUNING

STEPS = 5  # that are measured by default, beside one that warms up


def measure_study(args: Namespace) -> int:
    """The default and other settings, or two training loops, on data sets of the study."""
    sets = args.sets or (STUDY_SETS if args.study else WITH_PACKAGES)
    if args.baseline:
        settings = {"dtype": args.dtype, "batch_size": args.batch_size}
        results = race_study(sets, args.study, training_loops(args), 60 * args.minutes, settings)
    else:
        results = study(sets, args.study, args.ways or WAYS, args.flags.split())
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    rows = [["", *names], *([data, *(cell(found, name) for name in names)] for data, found in results.items())]
    return report(results, table(rows), environment("cpu"), args.json)


def training_loops(args: Namespace) -> dict[str, MakeRun]:
    """This project's and that of --baseline."""
    other = TrlRun if args.baseline == "trl" else partial(NanoVLMRun, checkout=check_nanovlm(args.nanovlm))
    return {"this project": OurRun, args.baseline: other}


def measure_speed(args: Namespace) -> int:
    """The stages of a training step, or two training loops in turns."""
    makers, steps = {} if args.profile else training_loops(args), args.steps or STEPS
    with tempfile.TemporaryDirectory() as temporary:
        folder, settings = Path(temporary), {"dtype": args.dtype, "batch_size": args.batch_size}
        setup = TrainingSetup.make(folder, args.model_size, args.images, **settings)
        where = environment("cpu", choose_training_dtype(args.dtype, torch.device("cpu")))
        if args.profile:
            keep_freed_memory()  # as train.py does
            seconds, text = profile_training(setup, folder / "profile", steps)
            return report(seconds, text, where, args.json)
        results, _ = race(setup, makers, folder, steps, 0)
        return report({result.name: result.as_dict() for result in results}, race_table(results), where, args.json)


def make_finetune_parser() -> Parser:
    parser = make_parser("finetune", __doc__)
    add = parser.add_argument
    add("--study", type=Path, metavar="ARCHIVES", help="the folder of archives that icons, flags and emoji are made of")
    add("--sets", nargs="+", choices=STUDY_SETS, help="data sets (default: all that can be made)")
    add("--ways", nargs="+", choices=WAYS, help="ways to train (default: all)")
    add("--flags", default="", metavar="'--max-steps N ...'", help="further flags of train.py")
    add("--baseline", choices=("nanovlm", "trl"), help="compare with another training loop on the CPU")
    add("--nanovlm", type=Path, metavar="PATH", help="a checkout of huggingface/nanoVLM, for --baseline nanovlm")
    add("--minutes", type=float, default=1.0, help="of training with each loop of --baseline (default: 1)")
    add("--profile", action="store_true", help="print the share of each stage in a training step on the CPU")
    add("--steps", type=positive, metavar="N", help=f"measure speed: steps (default: {STEPS})")
    add("--model-size", choices=TRAINED_SHAPES, default=EMBEDDED_SHAPE, help=f"model (default: {EMBEDDED_SHAPE})")
    add("--images", type=positive, default=64, metavar="N", help="scenes to measure speed on (default: 64)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="as of train.py (default: auto)")
    add("--batch-size", type=positive, default=FINETUNING.batch_size, metavar="N", help="(default: %(default)s)")
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
        measures_speed = args.profile or args.steps or args.model_size != EMBEDDED_SHAPE
        return measure_speed(args) if measures_speed else measure_study(args)
    except NanoVLMError as error:
        print_error(f"{parser.prog}: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
