"""The engine: one thread owns the model and decodes all requests in one continuous batch.

Coroutines call `submit` and read `TokenOutput`s from the handle it returns. A failure ends the request that caused it
and no other; the thread itself ends only by `close`.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from models.inference.continuous_batching import ContinuousBatch
from models.inference.request import Request, TokenOutput
from nanovlm.errors import NanoVLMError
from nanovlm.serving.errors import EngineError, EngineStoppedError

logger = logging.getLogger(__name__)

Result = TokenOutput | BaseException


@dataclass(eq=False, repr=False)
class _Sequence:
    """A request that was submitted."""

    request: Request
    results: asyncio.Queue[Result] = field(default_factory=asyncio.Queue)
    ended: bool = False  # cancelled, or nothing more is to be delivered; only the event loop's thread sets this
    retried: bool = False  # only the engine's thread uses it


@dataclass(eq=False)
class RequestHandle:
    """The outputs of a submitted request; for the event loop that called `submit`."""

    engine: "Engine"
    sequence: _Sequence

    async def outputs(self) -> list[TokenOutput]:
        """All new outputs, at least one. Raises EngineError, or the NanoVLMError that the request itself caused."""
        results = self.sequence.results
        received = [await results.get()]
        while not results.empty():
            received.append(results.get_nowait())
        outputs = []
        for item in received:
            if isinstance(item, (NanoVLMError, EngineError)):
                raise item
            if isinstance(item, BaseException):
                raise EngineError("the model failed on this request") from item
            outputs.append(item)
        return outputs

    def cancel(self) -> None:
        """Stop before the next step; a sequence that has ended is no error."""
        self.engine.cancel(self.sequence)


class Engine:
    """Decodes many requests at once. Call `start` in the event loop whose coroutines submit, and `close` at the end.

    make_batch returns an empty batch; it is called again when a batch has failed as a whole.
    """

    def __init__(self, make_batch: Callable[[], ContinuousBatch]):
        self._make_batch = make_batch
        self.batch = make_batch()
        # A sequence is to be added or, if it has ended, cancelled; None is to stop.
        self._commands: queue.SimpleQueue[_Sequence | None] = queue.SimpleQueue()
        self._active: dict[Hashable, _Sequence] = {}  # by request; only the engine's thread uses these two
        self._retries: deque[_Sequence] = deque()
        self._thread = threading.Thread(target=self._run, name="nanovlm-engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop between two steps; requests that have not ended fail."""
        self._commands.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request."""
        if not self.alive:
            raise EngineStoppedError("the engine does not run")
        sequence = _Sequence(request)
        self._commands.put(sequence)
        return RequestHandle(self, sequence)

    def cancel(self, sequence: _Sequence) -> None:
        if not sequence.ended:
            sequence.ended = True
            self._commands.put(sequence)

    def _run(self) -> None:
        """The thread: take commands and step the batch until `close`."""
        try:
            running = True
            while running:
                try:
                    running = self._take_commands()
                    if running and self._active:
                        self._step()
                except BaseException as error:  # SystemExit would end the thread silently
                    self._recover(error)
        finally:  # requests fail at once instead of waiting for their timeout
            self._fail_all(EngineStoppedError("the engine has stopped"))

    def _take_commands(self) -> bool:
        """Process all commands, waiting for one if there is nothing to do; False means stop."""
        while not (self._active and self._commands.empty()):
            command = self._commands.get()
            if command is None:
                return False
            if not command.ended:
                self._add(command)
            elif self._drop(command):
                self.batch.cancel(command.request)
        # After a failure of the whole batch, run its sequences one by one to isolate the one that caused it.
        if self._retries and not (self.batch.running or self.batch.waiting):
            sequence = self._retries.popleft()
            if sequence.request in self._active:
                sequence.retried = True
                self._add_to_batch(sequence)
        return True

    def _add(self, sequence: _Sequence) -> None:
        self._active[sequence.request] = sequence
        if self._retries:
            self._retries.append(sequence)
        else:
            self._add_to_batch(sequence)

    def _add_to_batch(self, sequence: _Sequence) -> None:
        try:
            self.batch.add(sequence.request)
        except BaseException as error:
            self._fail(sequence, error)

    def _step(self) -> None:
        """One step of the batch."""
        results: list[tuple[_Sequence, Result]] = []
        for output in self.batch.step():
            sequence = self._active.get(output.request)
            if sequence is None:
                continue
            if output.error:
                self._fail(sequence, output.error)
                continue
            if output.finished:
                del self._active[output.request]
            results.append((sequence, output))
        self._publish(results)

    def _recover(self, error: BaseException) -> None:
        """Replace a batch that has failed as a whole, for a reason that names no sequence.

        Sequences that have tokens lost their cache and fail. The others are tried once more, one at a time.
        """
        logger.error("a step of the whole batch failed", exc_info=error)
        self.batch = self._make_batch()
        self._retries.clear()
        for sequence in list(self._active.values()):
            if sequence.request.output or sequence.retried:
                self._fail(sequence, error)
            else:
                self._retries.append(sequence)

    def _fail(self, sequence: _Sequence, error: BaseException) -> None:
        if not isinstance(error, NanoVLMError):
            logger.error("a sequence failed", exc_info=error)
        self._drop(sequence)
        self._publish([(sequence, error)])

    def _drop(self, sequence: _Sequence) -> bool:
        """Forget a sequence; whether it was active."""
        return self._active.pop(sequence.request, None) is not None

    def _fail_all(self, error: BaseException) -> None:
        sequences = list(self._active.values())
        while not self._commands.empty():  # those that arrived after the last step
            if command := self._commands.get():
                sequences.append(command)
        self._active.clear()
        self._publish([(sequence, error) for sequence in sequences])

    def _publish(self, results: Sequence[tuple[_Sequence, Result]]) -> None:
        if results:
            with suppress(RuntimeError):  # the event loop is closed: nobody reads
                self._loop.call_soon_threadsafe(self._deliver, results)

    def _deliver(self, results: Sequence[tuple[_Sequence, Result]]) -> None:
        """In the event loop: hand results to the handles that wait for them."""
        for sequence, result in results:
            if not sequence.ended:
                sequence.ended = isinstance(result, BaseException) or result.finished is not None
                sequence.results.put_nowait(result)
