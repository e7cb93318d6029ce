"""The verb `compile`: a model's decode step as a package, which `caption` and `chat` then find by themselves."""

import argparse

from models.inference.aot_compile import package_path
from nanovlm.cli.caption import read_captioner


def compile_model(args: argparse.Namespace) -> int:
    """Make the package for args.model, unless it is there, and print its name."""
    captioner = read_captioner(args, prompts=[""], max_new_tokens=1, shown=False)
    print(package_path(captioner.model.decoder))
    return 0
