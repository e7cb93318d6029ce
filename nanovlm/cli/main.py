"""The program `nanovlm`: it parses a verb and its flags, runs it, and turns exceptions into messages and exit codes.

Exit codes: 0 success, 1 failure, 2 wrong use, 70 a bug in nanovlm, 130 interrupted.
"""

import argparse
import importlib
import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from nanovlm import __version__
from nanovlm.console import configure_logging, print_error, warnings_as_notes
from nanovlm.errors import NanoVLMError, UsageError, exit_code, is_out_of_memory

VERBS = ("caption", "review", "chat", "serve", "train", "evaluate", "export")  # modules of this package
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
INSTALL = "pip install -e " + shlex.quote(str(Path(__file__).parents[2]))


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports errors in one line, and takes images before and after flags."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        args = list(sys.argv[1:] if args is None else args)
        for at in reversed(range(len(args) - 1)):  # --metric -module:function is a value, not a flag
            if args[at] == "--metric" and re.fullmatch(r"-[\w.]+:\w+", args[at + 1]):
                args[at : at + 2] = [f"--metric={args[at + 1]}"]
        parsed, rest = super().parse_known_args(args, namespace)
        names, ended, more = rest, [], []
        if "--" in rest:
            names, ended, more = rest[: rest.index("--")], ["--"], rest[rest.index("--") + 1 :]
        for flag in (name for name in names if name[:1] == "-" and len(name) > 1):
            similar = get_close_matches(flag.partition("=")[0], self._option_string_actions, 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            self.error(f"unrecognized arguments: {flag}{hint}")
        if isinstance(getattr(parsed, "images", None), list):
            parsed.images += names + more
            return parsed, []
        return parsed, names + ended + more

    def error(self, message: str) -> NoReturn:
        print_error(f"{self.prog}: {message} (see {self.prog} --help)")
        self.exit(EXIT_USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `nanovlm VERB ...`; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    first = argv[0] if argv else "-"
    is_file = first[:1] != "-" and (os.path.exists(first) or Path(first).suffix)
    if is_file and first not in VERBS:
        print_error(f"nanovlm: {first!r} is not a verb; did you mean: nanovlm caption {shlex.join(argv)}")
        return EXIT_USAGE
    if similar := [] if first in VERBS else get_close_matches(first, VERBS, 1):
        print_error(f"nanovlm: {first!r} is not a verb; did you mean {similar[0]}?")
        return EXIT_USAGE
    names = [first] if first in VERBS else VERBS
    verbs = {name: import_verb(name) for name in names}  # each imports what its flags need
    parser = Parser(
        prog="nanovlm",
        description="Caption images, answer questions about them, serve, train and export models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n" + "".join(f"  {verb.EXAMPLE.splitlines()[0]}\n" for verb in verbs.values()),
    )
    parser.add_argument("--version", action="version", version=f"nanovlm {__version__}")
    subparsers = parser.add_subparsers(metavar="VERB", required=True)
    for name, verb in verbs.items():
        add_verb_flags(verb, subparsers.add_parser(name, **describe(verb, f"nanovlm {name}"), help=verb.HELP))
    return run(parser.parse_args(argv))


def run_verb(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one verb as a program of its own, as generate.py and train.py do; returns the exit code."""
    verb = import_verb(name)
    parser = Parser(**describe(verb, f"python {Path(sys.argv[0]).name}"))
    add_verb_flags(verb, parser)
    return run(parser.parse_args(argv))


def import_verb(name: str) -> ModuleType:
    """The module of a verb: it has HELP, EXAMPLE, add_flags(parser) and run(args), which returns the exit code."""
    return importlib.import_module(f"nanovlm.cli.{name}")


def describe(verb: ModuleType, program: str) -> dict[str, Any]:
    """The beginning of a verb's help: usage in one line, and examples for a program that runs it."""
    name = verb.__name__.rpartition(".")[2]
    examples = verb.EXAMPLE.replace(f"nanovlm {name}", program).splitlines()
    return {
        "usage": f"{program} [IMAGE ...] [--FLAG VALUE ...]" if name == "caption" else None,
        "description": "".join(f"  {example}\n" for example in examples) + f"\n{verb.HELP}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "add_help": False,
    }


def add_verb_flags(verb: ModuleType, parser: Parser) -> None:
    verb.add_flags(parser)
    parser.add_argument_group("help").add_argument("-h", "--help", action="help", help="show this text and exit")
    parser.set_defaults(run=verb.run, prog=parser.prog)


def run(args: argparse.Namespace) -> int:
    """Run the verb that args name; whatever it raises becomes a message on standard error and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a character that the terminal lacks is no failure
    configure_logging()
    os.environ["PYTHONSAFEPATH"] = "1"  # processes that libraries start import nothing from the current folder either
    try:
        try:
            os.getcwd()
        except FileNotFoundError:  # MKL would end the program, as if libtorch could not be loaded
            raise UsageError("the current folder was deleted; change to one that exists") from None
        with warnings_as_notes():
            return args.run(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("NANOVLM_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        message, code = explain(error, args)
        print_error(f"{args.prog}: {message}") if message else None
        return code


def explain(error: Exception, args: argparse.Namespace) -> tuple[str, int]:
    """The line and the exit code for an error; a bug's traceback is printed before."""
    match error:
        case NanoVLMError():
            field = error.field or ""
            line = f"--{field.replace('_', '-')} {error.problem}" if field in args else str(error)
            return line, exit_code(error)
        case _ if is_out_of_memory(error):
            ways = "--dtype bfloat16, --max-tiles 1 or smaller batches"
            return f"not enough memory; try {ways} ({error})", EXIT_FAILURE
        case ModuleNotFoundError() if (error.name or "").partition(".")[0] not in ("nanovlm", "models"):
            return (
                f"the Python package {error.name} is missing; install nanovlm and what it needs: {INSTALL}",
                EXIT_USAGE,
            )
        case OSError():
            with suppress(AttributeError, OSError):  # or Python, which flushes stdout at exit, reports the error again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            is_left = isinstance(error, BrokenPipeError)  # the reader of a pipe leaves, as `head` does
            return "" if is_left else str(error), EXIT_FAILURE
    traceback.print_exception(error)
    return "this is a bug in nanovlm; please report it with the lines above", EXIT_BUG
