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
from dataclasses import dataclass, field, replace

from torch import Tensor

from models.decoding import GREEDY, SamplingParams
from models.inference.continuous_batching import ContinuousBatch
from models.inference.requests import LogitsProcessor, PrefillError, TokenOutput
from models.inference.serving_caches import TiledImage
from nanovlm.errors import NanoVLMError, is_out_of_memory
from nanovlm.serving.errors import EngineError, EngineStoppedError

logger = logging.getLogger(__name__)

Result = TokenOutput | BaseException


@dataclass(eq=False)
class SequenceRequest:
    """A prompt and how to continue it: the arguments of `ContinuousBatch.add`."""

    input_ids: Tensor  # (T,)
    images: Sequence[TiledImage]
    max_new_tokens: int
    sampling: SamplingParams = GREEDY
    logits_processor: LogitsProcessor | None = None


@dataclass(eq=False, repr=False)
class _Sequence:
    """A requested sequence; it is its own key in the batch."""

    request: SequenceRequest  # of its own; without images once they are prefilled
    results: asyncio.Queue[Result] = field(default_factory=asyncio.Queue)
    ended: bool = False  # cancelled, or nothing more is to be delivered; only the event loop's thread sets this
    started: bool = False  # only the engine's thread uses these two
    retried: bool = False


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
        self._active: dict[Hashable, _Sequence] = {}  # by itself; only the engine's thread uses these two
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

    def submit(self, request: SequenceRequest) -> RequestHandle:
        """Queue a request."""
        if not self.alive:
            raise EngineStoppedError("the engine does not run")
        sequence = _Sequence(replace(request))
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
                self.batch.cancel(command)
        # After a failure of the whole batch, run its sequences one by one to isolate the one that caused it.
        if self._retries and not (self.batch.running or self.batch.waiting):
            sequence = self._retries.popleft()
            if sequence in self._active:
                sequence.retried = True
                self._add_to_batch(sequence)
        return True

    def _add(self, sequence: _Sequence) -> None:
        self._active[sequence] = sequence
        if self._retries:
            self._retries.append(sequence)
        else:
            self._add_to_batch(sequence)

    def _add_to_batch(self, sequence: _Sequence) -> None:
        try:
            self.batch.add(sequence, **vars(sequence.request))
        except BaseException as error:
            self._fail(sequence, error)

    def _step(self) -> None:
        """One step of the batch. Without memory for all its sequences the newest one fails, and the others go on."""
        try:
            outputs = self.batch.step()
        except PrefillError as error:
            if sequence := self._active.get(error.key):
                self._fail(sequence, error.__cause__ or error)
            return
        except Exception as error:
            started = [sequence for sequence in self._active.values() if sequence.started]
            if not is_out_of_memory(error) or not started:
                raise
            self.batch.cancel(started[-1])
            self._fail(started[-1], error)
            return
        self._handle_outputs(outputs)

    def _handle_outputs(self, outputs: Sequence[TokenOutput]) -> None:
        results: list[tuple[_Sequence, Result]] = []
        for output in outputs:
            sequence = self._active.get(output.key)
            if sequence is None:
                continue
            if output.error:
                self._fail(sequence, output.error)
                continue
            sequence.started, sequence.request.images = True, ()
            if output.finished:
                del self._active[sequence]
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
            if sequence.started or sequence.retried:
                self._fail(sequence, error)
            else:
                self._retries.append(sequence)

    def _fail(self, sequence: _Sequence, error: BaseException) -> None:
        if not isinstance(error, NanoVLMError):
            logger.error("a sequence failed", exc_info=error)
        self._drop(sequence)
        self._publish([(sequence, error)])

    def _drop(self, sequence: _Sequence) -> bool:
        """Forget a sequence and its images; whether it was active."""
        sequence.request.images = ()
        return self._active.pop(sequence, None) is not None

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
