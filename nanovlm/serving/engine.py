"""The engine: one thread owns the model and decodes all requests in one continuous batch.

Coroutines call `submit` and read `TokenOutput`s from the handle it returns. A failure ends the request that caused it
and no other; the thread itself ends only by `close`.
"""

import asyncio
import itertools
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
from models.inference.inference_model import InferenceModel
from models.inference.requests import LogitsProcessor, PrefillError, TokenOutput
from models.inference.serving_caches import TiledImage
from nanovlm.errors import NanoVLMError, is_out_of_memory
from nanovlm.serving.errors import EngineError, EngineStoppedError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SequenceRequest:
    """A prompt and how to continue it: the arguments of `ContinuousBatch.add`."""

    input_ids: Tensor  # (T,)
    images: Sequence[TiledImage]
    max_new_tokens: int
    sampling: SamplingParams = GREEDY
    logits_processor: LogitsProcessor | None = None
    top_logprobs: int | None = None
    client: str = ""
    model: InferenceModel | None = None  # the batch's own, or one with an adapter


@dataclass(eq=False)
class _Sequence:
    """One requested sequence, as the engine thread keeps track of it."""

    id: int
    request: SequenceRequest  # of its own; without images once they are prefilled
    started: bool = False
    retried: bool = False


@dataclass(eq=False)
class RequestHandle:
    """The outputs of one submitted request; for the event loop that called `submit`."""

    engine: "Engine"
    sequence_ids: list[int] = field(default_factory=list)
    queue: asyncio.Queue[tuple[int, TokenOutput | BaseException]] = field(default_factory=asyncio.Queue)

    async def outputs(self) -> list[TokenOutput]:
        """All new outputs, at least one; a key is the sequence's index.

        Raises EngineError, or the NanoVLMError that the request itself caused.
        """
        received = [await self.queue.get()]
        while not self.queue.empty():
            received.append(self.queue.get_nowait())
        outputs = []
        for index, item in received:
            if isinstance(item, (NanoVLMError, EngineError)):
                raise item
            if isinstance(item, BaseException):
                raise EngineError("the model failed on this request") from item
            outputs.append(replace(item, key=index))
        return outputs

    def cancel(self, index: int | None = None) -> None:
        """Stop one sequence, or all of them; those that have ended are no error."""
        for sequence_id in self.sequence_ids if index is None else [self.sequence_ids[index]]:
            self.engine.cancel(sequence_id)


class Engine:
    """Decodes many requests at once. Call `start` in the event loop whose coroutines submit, and `close` at the end.

    make_batch returns an empty batch; it is called again when a batch has failed as a whole.
    """

    def __init__(self, make_batch: Callable[[], ContinuousBatch]):
        self._make_batch = make_batch
        self.batch = make_batch()
        self._commands: queue.SimpleQueue[_Sequence | int | None] = queue.SimpleQueue()  # add, cancel by id, or stop
        self._ids = itertools.count()
        self._handles: dict[int, tuple[int, RequestHandle]] = {}  # only the event loop's thread uses these
        self._active: dict[Hashable, _Sequence] = {}  # by id; only the engine's thread uses these two
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

    def submit(self, requests: Sequence[SequenceRequest]) -> RequestHandle:
        """Queue the sequences of one request."""
        if not self.alive:
            raise EngineStoppedError("the engine does not run")
        handle = RequestHandle(self)
        for index, request in enumerate(requests):
            sequence_id = next(self._ids)
            handle.sequence_ids.append(sequence_id)
            self._handles[sequence_id] = index, handle
            self._commands.put(_Sequence(sequence_id, replace(request)))
        return handle

    def cancel(self, sequence_id: int) -> None:
        """Free the sequence's slot before the next step; no error if it has ended."""
        if self._handles.pop(sequence_id, None):
            self._commands.put(sequence_id)

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
        while True:
            try:
                command = self._commands.get(block=not self._active)
            except queue.Empty:
                break
            if command is None:
                return False
            if isinstance(command, _Sequence):
                self._add(command)
            elif self._active.pop(command, None):
                self.batch.cancel(command)
            del command  # or its images would stay in memory until the next one
        # After a failure of the whole batch, run its sequences one by one to isolate the one that caused it.
        if self._retries and not (self.batch.running or self.batch.waiting):
            sequence = self._retries.popleft()
            if sequence.id in self._active:
                sequence.retried = True
                self._add_to_batch(sequence)
        return True

    def _add(self, sequence: _Sequence) -> None:
        self._active[sequence.id] = sequence
        if self._retries:
            self._retries.append(sequence)
        else:
            self._add_to_batch(sequence)

    def _add_to_batch(self, sequence: _Sequence) -> None:
        try:
            self.batch.add(sequence.id, **vars(sequence.request))
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
            self.batch.cancel(started[-1].id)
            self._fail(started[-1], error)
            return
        self._handle_outputs(outputs)

    def _handle_outputs(self, outputs: Sequence[TokenOutput]) -> None:
        results: list[tuple[int, TokenOutput | BaseException]] = []
        for output in outputs:
            sequence = self._active.get(output.key)
            if sequence is None:
                continue
            if output.error:
                self._fail(sequence, output.error)
                continue
            sequence.started, sequence.request.images = True, ()
            if output.finished:
                del self._active[sequence.id]
            results.append((sequence.id, output))
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
            logger.error("sequence %d failed", sequence.id, exc_info=error)
        self._active.pop(sequence.id, None)
        self._publish([(sequence.id, error)])

    def _fail_all(self, error: BaseException) -> None:
        results: list[tuple[int, TokenOutput | BaseException]] = [
            (sequence.id, error) for sequence in self._active.values()
        ]
        while True:  # those that arrived after the last step
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, _Sequence):
                results.append((command.id, error))
        self._active.clear()
        self._publish(results)

    def _publish(self, results: Sequence[tuple[int, TokenOutput | BaseException]]) -> None:
        if results:
            with suppress(RuntimeError):  # the event loop is closed: nobody reads
                self._loop.call_soon_threadsafe(self._deliver, results)

    def _deliver(self, results: Sequence[tuple[int, TokenOutput | BaseException]]) -> None:
        """In the event loop: hand results to the handles that wait for them."""
        for sequence_id, result in results:
            if sequence_id not in self._handles:  # cancelled meanwhile
                continue
            index, handle = self._handles[sequence_id]
            if isinstance(result, BaseException) or result.finished:
                del self._handles[sequence_id]
            handle.queue.put_nowait((index, result))
