"""`nanovlm compile`: compile a model's decoder block once; `caption` and `chat` then find it by themselves."""

import argparse

from nanovlm import EMBEDDED
from nanovlm.cli.options import DTYPES, add_threads_flag

HELP = "Compile a model's decoder block for this machine, once; single pictures are then captioned faster."
EXAMPLE = "nanovlm compile out/mine --quantize int8"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        default=EMBEDDED,
        metavar="MODEL",
        help="a folder or a Hub id, owner/name (default: the embedded model)",
    )
    add("--revision", help="branch, tag or commit of a Hub model")
    add("--dtype", default="auto", choices=DTYPES)
    add("--quantize", choices=("int8", "int8-weights"), help="compile for weights in 8 bits")
    add_threads_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Compile the decoder block unless that was done before, and print the file's name. Only the config is read.

    The operations between products take a second of it.
    """
    from models.checkpoint import load_config, snapshot_path
    from models.inference.aot_compile import compile_for_config
    from models.inference.compiled_ops import can_compile_ops, compile_ops
    from nanovlm.device import choose_device, choose_dtype
    from nanovlm.threads import set_threads

    set_threads(args.threads)
    cfg = load_config(snapshot_path(args.model, args.revision))
    if can_compile_ops():
        compile_ops()
    print(compile_for_config(cfg, choose_dtype(args.dtype, choose_device("cpu")), args.quantize))
    return 0
