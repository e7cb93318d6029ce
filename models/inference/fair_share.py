"""Time shared among the clients of a continuous batch: whoever asks for much does not slow who asks for little."""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager


class FairShare:
    """Which clients take part in the next step of a batch.

    A client is light while it has at most an eighth as many requests as the batch has slots, else heavy. Where both
    kinds have requests, light clients get at least half of the time: after a step of all clients they step alone for as
    long as it took. `clock` returns seconds.
    """

    def __init__(self, n_slots: int, clock: Callable[[], float] = time.perf_counter):
        self.n_light, self.clock = max(1, n_slots // 8), clock
        self.is_shared = False  # between light and heavy clients
        self._owed_s = 0.0  # to the light clients, while is_shared
        self._is_full_step = True

    def next(self, clients: Iterable[Hashable]) -> set[Hashable]:
        """The clients of the next step, of those of all requests that run or wait."""
        counts = Counter(clients)
        light = {client for client, n in counts.items() if n <= self.n_light}
        was_shared, self.is_shared = self.is_shared, 0 < len(light) < len(counts)
        self._is_full_step = not self.is_shared or (was_shared and self._owed_s <= 0)  # the light ones begin
        return set(counts) if self._is_full_step else light

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time of the step that runs in this context."""
        start = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - start
            self._owed_s = seconds if self._is_full_step else self._owed_s - seconds
