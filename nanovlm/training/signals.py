"""SIGINT and SIGTERM: save a checkpoint, then exit as a shell expects it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TrainingInterrupted(SystemExit):
    """A signal stopped the training after a checkpoint was saved; exit code 130 for SIGINT, 143 for SIGTERM."""


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """A list to which SIGINT and SIGTERM are appended while the process goes on; a second signal acts as usual.

    In a thread other than the main thread, where Python allows no handlers, signals act as usual.
    """
    received: list[int] = []
    handlers: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def receive(number: int, frame) -> None:
        received.append(number)
        restore()

    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        restore()


def ignore_stop_signals(worker: int = 0) -> None:
    """In a data loader worker: Ctrl-C reaches every process of the terminal, and the training process stops them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
