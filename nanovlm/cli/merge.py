"""`nanovlm merge`: make an ordinary model of a checkpoint that a sharded training run wrote."""

import argparse
from pathlib import Path

from nanovlm.cli.export import add_dtype_flag
from nanovlm.errors import UsageError
from nanovlm.options import check_output_folder

HELP = "Merge a checkpoint of a sharded training run (--fsdp) into a model that every verb reads."
EXAMPLE = "nanovlm merge out/mine/checkpoints/step-500 --out out/step-500"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="FOLDER/checkpoints/step-N of a run with --fsdp")
    add("--out", required=True, metavar="FOLDER", help="folder for the model")
    add_dtype_flag(parser)


def run(args: argparse.Namespace) -> int:
    check_output_folder(args.out)
    checkpoint = Path(args.checkpoint)
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint}: no such folder; name FOLDER/checkpoints/step-N of a run with --fsdp")
    if found := [*checkpoint.glob("step-*"), *checkpoint.glob("checkpoints/step-*")]:
        raise UsageError(f"{checkpoint} is of a run, not of one step; name one of its checkpoints, as {found[0]}")

    import torch

    from models.checkpoint import WEIGHTS
    from nanovlm.training.checkpointing import merge_checkpoint

    out = Path(args.out)
    if (out / WEIGHTS).exists():
        raise UsageError(f"--out {out} holds a model already; name another folder")
    merge_checkpoint(checkpoint, out, getattr(torch, args.dtype))
    return 0
