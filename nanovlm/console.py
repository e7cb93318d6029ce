"""What a person reads when something is wrong: one line on standard error."""

import os
import sys
from typing import TextIO


def print_error(message: str) -> None:
    print(" ".join(message.split("\n")), file=sys.stderr, flush=True)


def bold(text: str, file: TextIO) -> str:
    """Text that stands out on a terminal; anywhere else, or where NO_COLOR is set (no-color.org), as it is."""
    if not file.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[1m{text}\033[0m"
