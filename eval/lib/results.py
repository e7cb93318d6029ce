"""Printed output that is kept: eval/results/CPU.txt, a file for each processor."""

import re
import shlex
import sys
from pathlib import Path

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
    path = folder / f"{file_name(cpu_name())}.txt"
    with path.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(['python', *sys.orig_argv[1:]])}\n{output}\n\n")
    return path


def file_name(cpu: str) -> str:
    """A processor's model name in lower case with dashes: "Intel(R) Xeon(R) CPU" is intel-xeon-cpu."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", cpu.lower())).strip("-")
