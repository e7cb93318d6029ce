"""Batches by their numbers, prepared in other processes; and what a signal does to all of these processes."""

import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from nanovlm.errors import NanoVLMError

Batch = dict[str, Any]  # the arguments of VisionLanguageModel.forward: tensors, and None for images of text only

PREFETCH = 4  # batches that each worker prepares ahead


class Batches(Iterator[Batch]):
    """Batches in the order of their numbers; `state` says where each stream stands after the last one."""

    def __init__(self, items: Iterator[Any], state: dict[str, Any]):
        self.items, self.state = items, dict(state)

    def __next__(self) -> Batch:
        batch = _received(next(self.items))
        self.state |= batch.pop("streams", {})
        return batch


@contextmanager
def load_batches(
    get_batch: Callable[[int], Batch], numbers: range, num_workers: int, state: dict[str, Any] | None = None
) -> Iterator[Batches]:
    """get_batch(number) for each of the numbers; workers end with the context, streams go on from state."""
    if hasattr(get_batch, "states"):
        get_batch = replace(get_batch, states=dict(state or {}))  # type: ignore[type-var]  # nanovlm.data.Batches
    loader: DataLoader = DataLoader(
        numbers,  # type: ignore[arg-type]  # a dataset is anything with a length and items
        batch_size=None,
        collate_fn=partial(_sendable if num_workers else _batch_or_error, get_batch),
        num_workers=num_workers,
        prefetch_factor=PREFETCH if num_workers else None,
        worker_init_fn=ignore_stop_signals,
    )
    items = iter(loader)
    try:
        yield Batches(items, state or {})
    finally:  # workers ignore signals, and would live as long as an error's traceback refers to the iterator
        if num_workers:
            items._shutdown_workers()  # type: ignore[attr-defined]  # there is no public way


def _batch_or_error(get_batch: Callable[[int], Batch], number: int) -> Batch | Exception:
    """A batch, or in its place an error of the user's data.

    A DataLoader would wrap an exception that a worker raises into another one, with a traceback as its message.
    """
    try:
        return get_batch(number)
    except (NanoVLMError, OSError) as error:
        return error


def _sendable(get_batch: Callable[[int], Batch], number: int) -> Batch | Exception | bytes:
    """The same for another process: tensors in shared memory or, where that is full, all of it pickled.

    The worker's queue would share them in a thread, which prints its error, and the training process would wait on.
    """
    item = _batch_or_error(get_batch, number)
    try:
        for value in item.values() if isinstance(item, dict) else ():
            if isinstance(value, Tensor):
                value.share_memory_()
    except RuntimeError:  # a container has 64 MB unless it was started with more
        return pickle.dumps(item)
    return item


def _received(item: Batch | Exception | bytes) -> Batch:
    if isinstance(item, bytes):
        return pickle.loads(item)
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
