"""Batches by their numbers, prepared in other processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, Dataset

from nanovlm.errors import NanoVLMError
from nanovlm.training.signals import ignore_stop_signals

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
