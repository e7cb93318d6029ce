"""Log lines of the library."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_lines(name: str = "nanovlm") -> Iterator[list[str]]:
    """The messages logged at INFO and above under a logger's name, as a list that grows."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
