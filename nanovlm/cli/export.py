"""`nanovlm export`: write a model in the layout of transformers' SmolVLM."""

import argparse
import logging

HELP = "Write a model in the layout of transformers' SmolVLM."
EXAMPLE = "nanovlm export out/mine --out out/smolvlm"

logger = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder or a Hub id, owner/name")
    add("--out", required=True, metavar="FOLDER", help="folder for the exported files")
    add("--revision", help="branch, tag or commit of a Hub model")
    add(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: float32)",
    )


def run(args: argparse.Namespace) -> int:
    from nanovlm.captioner import Captioner
    from nanovlm.errors import InputError, UsageError
    from nanovlm.export import export_notes, export_smolvlm

    try:
        captioner = Captioner.from_pretrained(args.model, "cpu", args.dtype, args.revision)
        export_smolvlm(captioner, args.out)
    except InputError as error:
        raise UsageError(str(error)) from error
    for note in export_notes(captioner.model.cfg):
        logger.warning("note: %s", note)
    return 0
