"""`nanovlm train`: fine-tuning on one's own data, or the recipe of the embedded model."""

import argparse
from dataclasses import fields

from nanovlm import PROMPT
from nanovlm.training.config import ADAPTERS, FINETUNING, SCENES

HELP = "Train a model. Rerun the same command to resume an interrupted run."
EXAMPLE = "nanovlm train --data photos --out out/mine"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--data", nargs="+", action="extend", metavar="PATH[@SHARE]", help="your pictures and words")
    task.add_argument("--recipe", choices=("scenes",), help="scenes: make the embedded model again, from nothing")
    add("--out", metavar="FOLDER", help="where the model goes; run again to go on where it stopped")
    add("--model", metavar="FOLDER_OR_HUB_ID", help="what to begin with (the embedded model)")
    add("--revision", help="branch, tag or commit of a Hub model")
    add("--prompt", metavar="TEXT", help=f"the question where there are only captions ({PROMPT!r})")
    add("--images", metavar="FOLDER", help="where the pictures lie that a .json names (found beside it)")
    add("--text-column", metavar="NAME", help="which column holds the answers (text, caption or answer)")
    add("--prompt-column", metavar="NAME", help="which column holds the questions (question or prompt)")
    add("--min-rating", action="append", metavar="NAME=N", help="only turns rated so, as formatting=3 (FineVision)")
    add("--stream", action="store_true", default=None, help="learn from a Hub data set while it is downloaded")
    add("--validation", type=float, metavar="N", help="hold out a share below 1, or a number of examples (0)")
    add("--on-bad-example", choices=("skip", "stop"), help="what becomes of one that cannot be used (stop)")
    add("--check-data", action="store_true", default=None, help="read all, count, show three examples; train nothing")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    for f in fields(SCENES):
        flag, usual = "--" + f.name.replace("_", "-"), getattr(FINETUNING, f.name)
        others = {"adapters": getattr(ADAPTERS, f.name), "scenes": getattr(SCENES, f.name)}
        defaults = [str(usual), *(f"{who}: {value}" for who, value in others.items() if value != usual)]
        help = f"{f.metadata['help']} ({'; '.join(defaults)})"
        if f.type is bool:
            add(flag, action=argparse.BooleanOptionalAction, help=help)
        else:
            add(flag, type=f.type, metavar="N", choices=f.metadata.get("choices") or None, help=help)


def run(args: argparse.Namespace) -> int:
    from nanovlm.training.distributed import run_and_exit
    from nanovlm.training.finetuning import train_model

    return run_and_exit(lambda: train_model(args))
