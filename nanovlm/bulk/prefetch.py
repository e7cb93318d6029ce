"""Images are read and preprocessed by threads while the model decodes others."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Lock
from typing import Generic, TypeVar

Prepared = TypeVar("Prepared")


class Prefetch(Generic[Prepared]):
    """Prepares images in order, at most `window` of them ahead of the threads that take them."""

    def __init__(self, paths: Iterable[str], prepare: Callable[[str], Prepared], window: int, threads: int):
        self.paths, self.prepare, self.window = iter(paths), prepare, window
        self.pool, self.lock = ThreadPoolExecutor(threads), Lock()
        self.queue: deque[tuple[str, Future[Prepared]]] = deque()

    def __enter__(self) -> "Prefetch[Prepared]":
        return self

    def __exit__(self, *error) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def take(self, wait: bool) -> tuple[str, Future[Prepared]] | None:
        """The next image and its future; None after the last one or, without `wait`, if the next is not prepared."""
        with self.lock:
            for path in islice(self.paths, max(0, self.window - len(self.queue))):
                self.queue.append((path, self.pool.submit(self.prepare, path)))
            return self.queue.popleft() if self.queue and (wait or self.queue[0][1].done()) else None

    def put_back(self, paths: Iterable[str]) -> None:
        """Prepare these images again, before all others."""
        with self.lock:
            self.queue.extendleft((path, self.pool.submit(self.prepare, path)) for path in paths)
