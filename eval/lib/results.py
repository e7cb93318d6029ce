"""Printed output that is kept: eval/results/CPU.txt, a file for each processor."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.lib.cpu_levels import levels_here
from eval.lib.hardware import cpu_name
from nanovlm.cli.main import Parser

RESULTS = Path(__file__).parent.parent / "results"


def add_save_flag(parser: Parser) -> None:
    """--save, None or the folder to append the output in."""
    what = "append the output to FOLDER/CPU.txt (default: eval/results)"
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, metavar="FOLDER", help=what)


def append_output(folder: Path, output: str) -> Path:
    """Append this process's command line and its output to the processor's file in folder, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_name([cpu_name(), *levels_here()[-1:]])}.txt"
    with path.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(['python', *sys.orig_argv[1:]])}\n{output}\n\n")
    return path


def file_name(names: Sequence[str]) -> str:
    """A processor's model name and highest level, as several may share a name: "AMD EPYC", "bf16" is amd-epyc-bf16."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", " ".join(names).lower())).strip("-")
