"""What the scripts here share: how their flags are read, and how each tells what it found, and where."""

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence

from nanovlm.cli.main import Parser


def make_parser(name: str, doc: str) -> Parser:
    """The parser of `python -m eval.NAME`, whose help is the module's docstring."""
    parser = Parser(prog=f"eval.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="everything, as one object")
    return parser


def positive(text: str) -> int:
    """The type of a flag that says how many."""
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{n} must be 1 or more")
    return n


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """The type of an argument that may be left out or given again; Python 3.11's choices refuse the former."""

    def known(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(map(repr, names))}")
        return name

    return known


def report(found: dict, text: str, where: str, as_json: bool, faults: Sequence[str] = ()) -> int:
    """Print what was found, as one object or as text, and where; then, on standard error, faults. The exit code."""
    print(json.dumps(found | {"faults": [*faults], "environment": where}, indent=2) if as_json else f"{text}\n{where}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0
