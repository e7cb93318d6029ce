"""The engine: one thread steps a continuous batch; coroutines of the event loop read the tokens of their requests."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from models.inference.continuous_batching import ContinuousBatch
from models.inference.request import Request, TokenOutput
from nanovlm.errors import NanoVLMError
from nanovlm.serving.openai_api import APIError

logger = logging.getLogger(__name__)

Result = TokenOutput | Exception


class Engine:
    """Decodes many requests at once. A failure ends the requests that it concerns, and never the thread.

    make_batch returns an empty batch; it is called again when a batch has failed as a whole.
    """

    def __init__(self, make_batch: Callable[[], ContinuousBatch]):
        self._make_batch = make_batch
        self.batch = make_batch()
        self._results: dict[Request, asyncio.Queue[Result]] = {}  # only the event loop touches it
        self._inbox: queue.SimpleQueue[tuple[Request, bool] | None] = queue.SimpleQueue()  # and whether to cancel it
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
        self._inbox.put((request, False))
        ended = False
        try:
            while not ended:
                result = await results.get()
                ended = isinstance(result, Exception) or result.finished is not None
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            del self._results[request]
            if not ended:
                self._inbox.put((request, True))

    def _run(self) -> None:
        """The thread: take commands and step the batch until `stop`."""
        try:
            while self._take_commands():
                try:
                    self._step()
                except Exception as error:
                    self.batch = self._make_batch()
                    self._fail(None, error)
        finally:
            self._fail(None, stopped())

    def _take_commands(self) -> bool:
        """Add and cancel requests, waiting if there is nothing else to do; False means stop."""
        while not (self.batch.running or self.batch.waiting) or not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            request, is_cancelled = command
            try:
                if is_cancelled:
                    self.batch.cancel(request)
                else:
                    self.batch.add(request)
            except Exception as error:
                self._fail(request, error)
            del command, request  # which hold images
        return True

    def _step(self) -> None:
        outputs = self.batch.step()
        for output in outputs:
            if output.error:
                self._fail(output.request, output.error)
        self._publish([(output.request, output) for output in outputs if not output.error])

    def _fail(self, request: Request | None, error: BaseException) -> None:
        """End a request, or all for None. Clients learn of an error of theirs, and no details of another."""
        if not isinstance(error, (NanoVLMError, APIError)):
            logger.error("the model failed", exc_info=error)
            error = APIError(500, "the model failed on this request; the server's log has the reason")
        self._publish([(request, error)])

    def _publish(self, results: Sequence[tuple[Request | None, Result]]) -> None:
        """Hand results to the coroutines that wait for them; one without a request is for all."""

        def deliver() -> None:
            for request, result in results:
                for receiver in [request] if request else list(self._results):
                    if receiver in self._results:
                        self._results[receiver].put_nowait(result)

        if results:
            with suppress(RuntimeError):  # the event loop is closed: nobody reads
                self._loop.call_soon_threadsafe(deliver)


def stopped() -> APIError:
    return APIError(503, "the model does not run any more; the server's log has the reason")
