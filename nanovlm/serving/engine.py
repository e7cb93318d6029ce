"""One thread that owns the model: requests join and leave its batch between two tokens."""

import asyncio
import itertools
import queue
import threading
from collections.abc import Iterable

from torch import Tensor

from models.decoding import SamplingParams
from models.inference.continuous_batching import ContinuousBatch, PrefillError, TokenOutput
from models.vision_language_model import VisionLanguageModel


class Engine:
    """Answers many prompts at once. Begins with `start`, in the event loop whose coroutines ask; ends with `close`."""

    def __init__(self, model: VisionLanguageModel, eos_token_id: int, rows: int):
        self._new_batch = lambda: ContinuousBatch(model, max_num_seqs=rows, eos_token_id=eos_token_id)
        self._batch = self._new_batch()
        self._orders: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()  # a key and what to add; None cancels it
        self._keys = itertools.count()
        self._listeners: dict[int, tuple[int, asyncio.Queue]] = {}  # touched in the event loop's thread only
        self._thread = threading.Thread(target=self._work, name="nanovlm-engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop between two tokens; whoever still listens hears no more."""
        self._orders.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        return self._batch.waiting

    @property
    def running(self) -> int:
        return self._batch.running

    def ask(
        self, input_ids: Tensor, images: Tensor | None, max_new_tokens: int, samplings: Iterable[SamplingParams]
    ) -> "Answers":
        """Answers to the prompt, ids (T,) and images (N, 3, S, S), one by each of the samplings."""
        answers = Answers(self)
        for index, sampling in enumerate(samplings):
            answers.keys.append(key := next(self._keys))
            self._listeners[key] = (index, answers.heard)
            options = {"max_new_tokens": max_new_tokens, "sampling": sampling}
            self._orders.put((key, (input_ids, images, options)))
        return answers

    def cancel(self, key: int) -> None:
        """Its row is free before the next token; a key that has ended is no error."""
        if self._listeners.pop(key, None):
            self._orders.put((key, None))

    def _work(self) -> None:
        """Obey orders and take steps, until told to stop."""
        keys: set[int] = set()  # whose answers have not ended
        while True:
            told: list[tuple[int, TokenOutput | Exception]] = []
            try:
                while order := self._orders.get(block=not keys and not told):
                    key, asked = order
                    keys.add(key) if asked else keys.discard(key)
                    told += self._obey(key, asked)
                    del order, asked  # else the last prompt's pixels would stay here while its answer is said
                return
            except queue.Empty:
                told += self._step(keys)
            keys -= {key for key, said in told if isinstance(said, Exception) or said.finished}
            self._loop.call_soon_threadsafe(self._tell, told)

    def _obey(self, key: int, asked: tuple | None) -> list[tuple[int, Exception]]:
        try:
            if asked is None:
                self._batch.cancel(key)
            else:
                input_ids, images, options = asked
                self._batch.add(key, input_ids, images, **options)
        except ValueError as error:  # it can never be read
            return [(key, error)]
        return []

    def _step(self, keys: set[int]) -> list[tuple[int, TokenOutput | Exception]]:
        try:
            return [(said.key, said) for said in self._batch.step()]
        except PrefillError as error:
            return [(error.key, error)]
        except Exception as error:  # out of memory, most likely: those who run fail, others are answered afterwards
            self._batch = self._new_batch()
            return [(key, error) for key in keys]

    def _tell(self, told: list[tuple[int, TokenOutput | Exception]]) -> None:
        for key, said in told:
            if key in self._listeners:  # else it has been cancelled meanwhile
                index, heard = self._listeners[key]
                if isinstance(said, Exception) or said.finished:
                    del self._listeners[key]
                heard.put_nowait((index, said))


class Answers:
    """What is said to one prompt, to be heard in the event loop; `close` cancels what is not yet said."""

    def __init__(self, engine: Engine):
        self.engine, self.keys, self.heard = engine, [], asyncio.Queue()

    async def hear(self) -> list[tuple[int, TokenOutput]]:
        """All that was said since the last call, at least one token: whose, by its index, and which."""
        heard = [await self.heard.get()]
        while not self.heard.empty():
            heard.append(self.heard.get_nowait())
        for _, said in heard:
            if isinstance(said, Exception):
                raise said
        return heard

    def cancel(self, index: int) -> None:
        self.engine.cancel(self.keys[index])

    def close(self) -> None:
        for index in range(len(self.keys)):
            self.cancel(index)
