"""Threads that read and preprocess images while the model decodes others, and threads of several workers."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from threading import Event, Lock, Semaphore
from typing import Generic, TypeVar

Prepared = TypeVar("Prepared")
Item = TypeVar("Item")


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


def merge_iterators(iterators: Sequence[Iterator[Item]], max_pending: int) -> Generator[Item, None, None]:
    """Yield what all iterators yield, each run by a thread of its own, as it comes.

    At most max_pending items wait for the consumer, so a run that is stopped loses little. An error of one iterator
    stops the others, and is raised after the items that all of them have finished.
    """
    queue: SimpleQueue[tuple[Item] | Future[None]] = SimpleQueue()  # (item,), and the future of an ended iterator
    free, stopped = Semaphore(max_pending), Event()

    def consume(iterator: Iterator[Item]) -> None:
        for item in iterator:
            free.acquire()
            queue.put((item,))
            if stopped.is_set():
                return

    def stop() -> None:
        stopped.set()
        free.release(len(iterators))

    first_error: BaseException | None = None
    with ThreadPoolExecutor(len(iterators)) as pool:
        running = [pool.submit(consume, iterator) for iterator in iterators]
        for future in running:
            future.add_done_callback(queue.put)
        try:
            while running:
                entry = queue.get()
                if isinstance(entry, tuple):
                    yield entry[0]
                    free.release()
                    continue
                running.remove(entry)
                if error := entry.exception():
                    first_error = first_error or error
                    stop()
        finally:
            stop()
    if first_error is not None:
        raise first_error
