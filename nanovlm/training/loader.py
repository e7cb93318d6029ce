"""Load batches, prepared by other processes, and catch the signals that reach all of these processes."""

import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from nanovlm.errors import NanoVLMError

Batch = dict[str, Any]  # the arguments of VisionLanguageModel.forward: tensors, and None for images of text only

PREFETCH = 4  # batches that each worker prepares ahead


@contextmanager
def load_batches(
    get_batch: Callable[[int], Batch], numbers: range, num_workers: int, state: dict[str, Any] | None = None
) -> Iterator[tuple[Iterator[Batch], dict[str, Any]]]:
    """Yield an iterator of get_batch(number), and the positions in streams that its batches have reached.

    Workers end with the context. Streams go on from the positions in state.
    """
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
        reached: dict[str, Any] = {}
        yield _received(items, state or {}, reached), reached
    finally:  # workers ignore signals, and would live as long as an error's traceback refers to the iterator
        if num_workers:
            items._shutdown_workers()  # type: ignore[attr-defined]  # there is no public way


def _received(items: Iterator[Any], start: Mapping[str, Any], reached: dict[str, Any]) -> Iterator[Batch]:
    """Unpack batches and raise errors; add to reached the positions in streams that differ from start."""
    for item in items:
        item = pickle.loads(item) if isinstance(item, bytes) else item
        if isinstance(item, Exception):
            raise item
        streams = item.pop("streams", {})  # a worker knows of the streams of others only where they started
        reached.update((key, state) for key, state in streams.items() if state != start.get(key))
        yield item


def _prepare(get_batch: Callable[[int], Batch], number: int) -> Batch | Exception | bytes:
    """Make a batch, or return the error of the user's data: a DataLoader would add a worker's traceback to it.

    A worker shares its tensors or, where shared memory is full (64 MB in a container), pickles them. Shared later, by
    the queue's thread, tensors that do not fit would leave the training process waiting.
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
