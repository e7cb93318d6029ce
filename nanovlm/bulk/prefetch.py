"""Pictures that are read while the model speaks of others."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Lock
from typing import Any


class Prefetch:
    """Pictures in turn, read by threads ahead of whoever takes them; several threads may take.

    No more than window of them are read or wait at a time. read is to return its errors, not to raise them.
    """

    def __init__(self, pictures: Iterable[str], read: Callable[[str], Any], window: int, workers: int):
        self.pictures, self.read, self.window = iter(pictures), read, window
        self.pool, self.lock = ThreadPoolExecutor(workers), Lock()
        self.ahead: deque[tuple[str, Future]] = deque()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *error) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def take(self, wait: bool) -> tuple[str, Future] | None:
        """The next picture and what is read of it, with wait even if it is still being read; None if there is none."""
        with self.lock:
            for picture in islice(self.pictures, max(0, self.window - len(self.ahead))):
                self.ahead.append((picture, self.pool.submit(self.read, picture)))
            return self.ahead.popleft() if self.ahead and (wait or self.ahead[0][1].done()) else None

    def again(self, pictures: Iterable[str]) -> None:
        """Read these once more, before all others."""
        with self.lock:
            self.ahead.extendleft((picture, self.pool.submit(self.read, picture)) for picture in pictures)
