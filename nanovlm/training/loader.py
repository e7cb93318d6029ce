"""Load batches, prepared by other processes, and catch the signals that reach all of these processes."""

import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from nanovlm.errors import NanoVLMError

Batch = dict[str, Any]  # the arguments of VisionLanguageModel.forward: tensors, and None for images of text only

PREFETCH = 4  # batches that each worker prepares ahead


class Batches(Iterator[Batch]):
    """Batches in the order of their numbers; `state` has the position in each stream that was read."""

    def __init__(self, items: Iterator[Any], start: dict[str, Any]):
        self.items = items
        self.start = start
        self.state: dict[str, Any] = {}

    def __next__(self) -> Batch:
        item = next(self.items)
        if isinstance(item, bytes):
            item = pickle.loads(item)
        if isinstance(item, Exception):
            raise item
        streams = item.pop("streams", {})  # a worker knows of the streams of others only where they started
        self.state |= {key: state for key, state in streams.items() if state != self.start.get(key)}
        return item


@contextmanager
def load_batches(
    get_batch: Callable[[int], Batch], numbers: range, num_workers: int, state: dict[str, Any] | None = None
) -> Iterator[Batches]:
    """Yield an iterator of get_batch(number); workers end with the context, streams go on from state."""
    if hasattr(get_batch, "states"):
        get_batch = replace(get_batch, states=dict(state or {}))  # type: ignore[type-var]  # nanovlm.data.ExampleBatches
    loader: DataLoader = DataLoader(
        numbers,  # type: ignore[arg-type]  # a dataset is anything with a length and items
        batch_size=None,
        collate_fn=partial(_prepare, get_batch),
        num_workers=num_workers,
        prefetch_factor=PREFETCH if num_workers else None,
        worker_init_fn=_ignore_stop_signals,
    )
    items = iter(loader)
    try:
        yield Batches(items, state or {})
    finally:  # workers ignore signals, and would live as long as an error's traceback refers to the iterator
        if num_workers:
            items._shutdown_workers()  # type: ignore[attr-defined]  # there is no public way


def _prepare(get_batch: Callable[[int], Batch], number: int) -> Batch | Exception | bytes:
    """Make a batch, or return the error of the user's data: a DataLoader would add a worker's traceback to it.

    A worker shares its tensors or, where shared memory is full, pickles them: a container has 64 MB by default. Its
    queue would share them in a thread, which prints its error, and the training process would wait on.
    """
    try:
        batch = get_batch(number)
    except (NanoVLMError, OSError) as error:
        return error
    try:
        for value in batch.values() if get_worker_info() else ():
            if isinstance(value, Tensor):
                value.share_memory_()
    except RuntimeError:
        return pickle.dumps(batch)
    return batch


def _ignore_stop_signals(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal, and the training process ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class TrainingInterrupted(SystemExit):
    """A signal stopped the training after a checkpoint was saved; exit code 130 for SIGINT, 143 for SIGTERM."""


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """Yield a list that collects SIGINT and SIGTERM while the process goes on; a second signal acts as usual."""
    received: list[int] = []
    handlers: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def receive(number: int, frame) -> None:
        received.append(number)
        restore()

    if threading.current_thread() is threading.main_thread():  # Python allows no handlers in others
        handlers = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        restore()
