"""`nanovlm compile`: compile a model's decoder block once; `caption` and `chat` then find it by themselves."""

import argparse

from nanovlm import EMBEDDED
from nanovlm.cli.options import DTYPES, ModelOptions, load_captioner

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
    add("--quantize", choices=("int8",), help="compile for weights in 8 bits")
    parser.set_defaults(device="cpu", compile=True)


def run(args: argparse.Namespace) -> int:
    """Compile the decoder block unless that was done before, and print the file's name."""
    from models.inference.aot_compile import package_path
    from models.inference.inference_model import InferenceModel

    inference = load_captioner(ModelOptions.from_args(args)).inference
    assert isinstance(inference, InferenceModel)  # from_pretrained makes nothing else
    print(package_path(inference.network.decoder.blocks[0]))
    return 0
