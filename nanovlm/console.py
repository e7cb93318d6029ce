"""Output for people: text on standard output; log lines, notes, errors and progress bars on standard error."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends; ESC begins a command


def print_error(message: str) -> None:
    """Print a message as one line on standard error, above any progress bar."""
    _print(" ".join(message.split("\n")))


def _print(text: str) -> None:
    if sys.stderr is None:  # as under pythonw, or with 2>&-
        return
    text = for_terminal(text, sys.stderr)
    tqdm_module = sys.modules.get("tqdm")
    with suppress(OSError):  # on a full disk, or after `2>&1 | head`, the work goes on without its messages
        if tqdm_module is not None and getattr(tqdm_module.tqdm, "_instances", None):
            tqdm_module.tqdm.write(text, file=sys.stderr)  # clears the bar, prints, and draws it again
            sys.stderr.flush()
        else:
            print(text, file=sys.stderr, flush=True)


class _StderrHandler(logging.Handler):
    """Write records to the sys.stderr of the moment, which tests and programs may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _print(self.format(record))
        except Exception:
            self.handleError(record)


def configure_logging() -> None:
    """Print what `nanovlm` and `models` log at INFO and above on standard error, as bare messages.

    For programs only: importing nanovlm configures no logging. Calling it again changes nothing.
    """
    for name in ("nanovlm", "models"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
            logger.addHandler(_StderrHandler())


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print Python warnings as `note: MESSAGE`, without the line of code that raised them."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *details: print_error(f"note: {message}")
        yield


def is_terminal(file: TextIO | None) -> bool:
    """True of a terminal; None is a standard file that is closed."""
    return file is not None and file.isatty()


def has_terminal() -> bool:
    """True if standard error is a terminal that can draw."""
    return is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"


def progress_bar(total: int, unit: str, desc: str | None = None, is_hidden: bool = False, **options: Any) -> "tqdm":
    """A tqdm bar on standard error; it draws on a terminal only. Close it, or use it as a context manager."""
    from tqdm import tqdm

    is_hidden = is_hidden or not has_terminal()
    return tqdm(total=total, unit=unit, desc=desc, disable=is_hidden, dynamic_ncols=True, file=sys.stderr, **options)


def slow(what: str, ways: Sequence[str]) -> str:
    """The line that says what is slow, and the flags that make it faster."""
    return f"note: {what}; faster: {' or '.join(ways)}"


def print_text(text: str, end: str = "\n") -> None:
    """Print text on standard output at once; control characters do not reach a terminal."""
    print(for_terminal(text, sys.stdout), end=end, flush=True)


def for_terminal(text: str, file: TextIO | None) -> str:
    """Text without control characters, which would command a terminal; unchanged for files and pipes."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if is_terminal(file) else text


def printable(name: str) -> str:
    """A name on one line: as it is, or quoted and escaped where it holds control characters."""
    return name if name and name.isprintable() else repr(name)


def count(n: int, noun: str) -> str:
    """A number and its noun, such as 1 image or 2,000 images."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines: first column to the left, others to the right, each as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = "".join(f"  {cell:>{width}}" for cell, width in zip(others, widths[1:]))
        lines.append(f"{first:{widths[0]}}{cells}".rstrip())
    return "\n".join(lines)
