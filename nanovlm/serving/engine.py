"""The engine: one thread steps a continuous batch; coroutines of the event loop read the tokens of their requests."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from models.inference.continuous_batching import ContinuousBatch, Request, TokenOutput
from nanovlm.serving.web import APIError

Result = TokenOutput | Exception


class Engine:
    """Decodes many requests at once. A failure ends the requests that it concerns, and never the thread.

    make_batch returns an empty batch; it is called again when a batch has failed as a whole.
    """

    def __init__(self, make_batch: Callable[[], ContinuousBatch]):
        self._make_batch = make_batch
        self.batch = make_batch()
        self._results: dict[Request, asyncio.Queue[Result]] = {}  # only the event loop touches it
        self._inbox: queue.SimpleQueue[tuple[str, Request] | None] = queue.SimpleQueue()  # add or cancel; None stops
        self._thread = threading.Thread(target=self._run, name="nanovlm-engine", daemon=True)

    def start(self) -> None:
        """Start in the event loop whose coroutines call `generate`."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Stop between two steps; requests that have not ended fail."""
        self._inbox.put(None)
        if self.alive:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """Yield the request's tokens as they come. Closing the generator cancels the request."""
        if not self.alive:
            raise stopped()
        results = self._results[request] = asyncio.Queue()
        self._inbox.put(("add", request))
        finished = None
        try:
            while finished is None:
                result = await results.get()
                if isinstance(result, Exception):
                    raise result
                yield result
                finished = result.finished
        finally:
            del self._results[request]
            self._inbox.put(("cancel", request))  # no error for one that has ended

    def _run(self) -> None:
        """The thread: take commands and step the batch until `stop`."""
        try:
            while self._take_commands():
                try:
                    outputs = self.batch.step()
                except Exception as error:
                    self.batch = self._make_batch()
                    self._publish([(None, error)])
                else:
                    self._publish([(output.request, output.error or output) for output in outputs])
        finally:
            self._publish([(None, stopped())])

    def _take_commands(self) -> bool:
        """Add and cancel requests, waiting if there is nothing else to do; False means stop."""
        while not (self.batch.running or self.batch.waiting) or not self._inbox.empty():
            if (command := self._inbox.get()) is None:
                return False
            name, request = command
            try:
                getattr(self.batch, name)(request)
            except Exception as error:
                self._publish([(request, error)])
            del command, request  # which hold images
        return True

    def _publish(self, results: Sequence[tuple[Request | None, Result]]) -> None:
        """Hand results to the coroutines that wait for them; one without a request is for all."""

        def deliver() -> None:
            for request, result in results:
                for receiver in [request] if request else list(self._results):
                    if receiver in self._results:
                        self._results[receiver].put_nowait(result)

        with suppress(RuntimeError):  # the event loop is closed: nobody reads
            self._loop.call_soon_threadsafe(deliver)


def stopped() -> APIError:
    return APIError(503, "the model does not run any more; the server's log has the reason")
