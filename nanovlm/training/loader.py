"""Batches by their numbers, prepared in other processes; and what a signal does to all of these processes."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, Dataset

from nanovlm.errors import NanoVLMError

Batch = dict[str, Any]  # the arguments of VisionLanguageModel.forward: tensors, and None for images of text only

PREFETCH = 4  # batches that each worker prepares ahead


class BatchDataset(Dataset):
    """get_batch(number) for each of the numbers; an error of the user's data is returned in the place of a batch.

    A DataLoader would wrap an exception that a worker raises into another one, with a traceback as its message.
    """

    def __init__(self, get_batch: Callable[[int], Batch], numbers: range):
        self.get_batch, self.numbers = get_batch, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Batch | Exception:
        try:
            return self.get_batch(self.numbers[i])
        except (NanoVLMError, OSError) as error:
            return error


@contextmanager
def load_batches(get_batch: Callable[[int], Batch], numbers: range, num_workers: int) -> Iterator[Iterator[Batch]]:
    """An iterator over get_batch(number) for each of the numbers; the workers end with the context."""
    loader = DataLoader(
        BatchDataset(get_batch, numbers),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=PREFETCH if num_workers else None,
        worker_init_fn=ignore_stop_signals,
    )
    items = iter(loader)
    try:
        yield map(_raise_error, items)
    finally:  # workers ignore signals, and would live as long as an error's traceback refers to the iterator
        if num_workers:
            items._shutdown_workers()  # type: ignore[attr-defined]  # there is no public way


def _raise_error(item: Batch | Exception) -> Batch:
    if isinstance(item, Exception):
        raise item
    return item


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
