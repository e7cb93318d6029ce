"""Shared by the evaluation commands: flags, progress lines, tables, and the report with its exit code."""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eval.lib.hardware import cpu_name, levels_here
from nanovlm.cli.main import Parser
from nanovlm.device import DTYPES

RESULTS = Path(__file__).parent.parent / "results"  # CPU.txt, a file for each processor
DEVICES = ("auto", "cpu", "cuda", "mps")


def make_parser(name: str, doc: str | None) -> Parser:
    """The parser of `python -m eval.NAME`; its help text is the module's docstring."""
    parser = Parser(prog=f"eval.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print all results as one JSON object")
    return parser


def add_threads_flag(parser: Parser, default: str | None = None) -> None:
    """--threads, which takes effect when the flags are parsed, here and in processes that are started later."""
    what = f"CPU threads (default: {default or 'as many as PyTorch chooses'})"
    parser.add_argument("--threads", type=use_threads, default=default, metavar="N", help=what)


def use_threads(text: str) -> int:
    """argparse type: make PyTorch use that many threads, and return their number."""
    threads = positive(text)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = text
    return threads


def add_device_flags(parser: Parser, dtype: str = "auto") -> None:
    """--device, --dtype and --threads."""
    add_threads_flag(parser)
    parser.add_argument("--device", default="auto", choices=DEVICES, help="where to compute (default: auto)")
    parser.add_argument("--dtype", default=dtype, choices=("auto", *DTYPES), help=f"precision (default: {dtype})")


def add_save_flag(parser: Parser) -> None:
    """--save, None or the folder to append the output in."""
    what = "append the output to FOLDER/CPU.txt (default: eval/results)"
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, metavar="FOLDER", help=what)


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{n} must be 1 or more")
    return n


def progress(line: str) -> None:
    """Print a progress line on stderr; results alone go to stdout."""
    print(line, file=sys.stderr, flush=True)


def relative_error(values: Tensor, reference: Tensor) -> float:
    """Root mean square difference over the reference's standard deviation."""
    values, reference = values.float(), reference.float()
    return float((values - reference).square().mean().sqrt() / reference.std())


def table(rows: Sequence[Sequence[str]], gap: int = 2) -> str:
    """Rows of cells as lines: first column to the left, others to the right, each as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = "".join(f"{'':{gap}}{cell:>{width}}" for cell, width in zip(others, widths[1:]))
        lines.append(f"{first:{widths[0]}}{cells}".rstrip())
    return "\n".join(lines)


def report(
    results: dict,
    text: str,
    environment: str,
    as_json: bool,
    failures: Sequence[str] = (),
    save: Path | None = None,
) -> int:
    """Print results as JSON or as text, the environment once, and failed checks on stderr.

    The command line and the text are also appended to the processor's file in the folder `save`. Returns the exit
    code: 1 if a check failed, else 0.
    """
    output = f"{text}\n{environment}"
    if save:
        save.mkdir(parents=True, exist_ok=True)
        path = save / f"{file_name([cpu_name(), *levels_here()[-1:]])}.txt"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"$ {shlex.join(['python', *sys.orig_argv[1:]])}\n{output}\n\n")
        progress(f"appended to {path}")
    if as_json:
        output = json.dumps(results | {"failures": [*failures], "environment": environment}, indent=2)
    print(output)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def file_name(names: Sequence[str]) -> str:
    """A processor's model name and highest level, as several may share a name: "AMD EPYC", "bf16" is amd-epyc-bf16."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", " ".join(names).lower())).strip("-")
