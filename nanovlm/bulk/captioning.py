"""Captions of many pictures in one go.

Threads read and resize pictures while the model speaks of others; a caption that has ended makes room for the next.
A small model speaks in lanes, a thread for each core, each with a batch of its own.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any

import torch

from models.inference.continuous_batching import ContinuousBatch, PrefillError
from nanovlm.bulk.prefetch import Prefetch
from nanovlm.captioner import Captioner
from nanovlm.errors import ImageError
from nanovlm.image_processing import printable
from nanovlm.processor import EncodedPrompt
from nanovlm.progress import Progress

BATCH_SIZE, BATCH_OF_SINGLES = 16, 128  # pictures; where each of them is one image only
CLUMP = 1 / 4  # of a batch: where less of it is free, the next pictures wait, for together they are read faster
CORES = os.cpu_count() or 1
MOST_WORKERS = 8
SMALL = 2**24  # bytes of weights, below which products are too short to be worth dividing among cores
MOST_LANES = 4  # of a small model: products run beside each other, Python does not
ROOM = 2**30  # bytes of pixels that may wait for the model
FAULTS = (ValueError, MemoryError, OSError, RuntimeError)  # of one picture; torch's lack of memory is the last


class BulkCaptioner:
    """Captions of many pictures, and what they took."""

    def __init__(self, captioner: Captioner, prompt: str, options: dict[str, Any]):
        self.captioner, self.prompt, self.options = captioner, prompt, options
        self.done, self.seconds = 0, 0.0  # captions, and what they took
        self.images = captioner.processor.max_tiles_per_image
        self.batch_size = BATCH_SIZE if self.images > 1 else BATCH_OF_SINGLES
        weights = captioner.model.parameters()
        small = captioner.model.device.type == "cpu" and sum(w.nbytes for w in weights) < SMALL
        self.spent = [0.0] * (min(CORES, MOST_LANES) if small else 1)  # seconds in the model, of each lane

    @property
    def busy(self) -> float:
        """The share of time that the model ran, of all lanes."""
        return sum(self.spent) / (self.seconds * len(self.spent))

    def __call__(
        self,
        pictures: Sequence[str],
        batch_size: int,
        write: Callable[[str, str], None],
        fail: Callable[[str, str], None],
    ) -> None:
        """Tell write of every picture and its caption, or fail of the picture and the reason, as they are found."""
        started, failed = time.perf_counter(), 0
        progress = Progress(len(pictures))
        with self.cores(), closing(self.answers(pictures, batch_size)) as answers:
            try:
                for picture, text in answers:
                    try:
                        if isinstance(text, Exception):
                            raise text
                        write(picture, text)
                        self.done += 1
                    except FAULTS as error:
                        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                            raise  # nor would the next be written
                        failed += 1
                        progress.clear()
                        fail(picture, reason_of(error, picture))
                    self.seconds = time.perf_counter() - started
                    progress.show(self.done + failed, f"{failed:,} failed" if failed else "")
            finally:
                progress.clear()

    @contextmanager
    def cores(self) -> Iterator[None]:
        """Give each lane one core, or all of them to the only one."""
        before = torch.get_num_threads()
        torch.set_num_threads(1 if len(self.spent) > 1 else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def window(self, rows: int) -> int:
        """How many pictures may wait for the model: for some batches, but no more than there is room for."""
        return max(2, min(4 * rows, ROOM // (self.images * 3 * self.captioner.model.cfg.vit_img_size**2 * 4)))

    def answers(self, pictures: Iterable[str], rows: int) -> Iterator[tuple[str, str | Exception]]:
        """Each picture with its answer, or why there is none, as they are found; so many rows run at once in a lane."""
        with Prefetch(pictures, self.prepare, self.window(rows), min(MOST_WORKERS, CORES)) as ahead:
            lanes = [self.lane(i, ahead, rows) for i in range(len(self.spent))]
            yield from together(lanes, rows) if len(lanes) > 1 else lanes[0]

    def lane(self, i: int, ahead: Prefetch, rows: int) -> Iterator[tuple[str, str | Exception]]:
        """The same of those that this lane takes. What is too much for the memory begins anew in half as many rows."""
        batch, said = self.batch(rows), {}  # each picture's ids
        while True:
            joining = rows - len(said) >= CLUMP * rows
            while joining and len(said) < rows and (taken := ahead.take(wait=not said)):
                picture, future = taken
                if isinstance(row := future.result(), Exception):
                    yield picture, row
                else:
                    ids, (images,) = row
                    batch.add(picture, torch.tensor(ids), images, **self.options)
                    said[picture] = []
            if not said:
                return
            started = time.perf_counter()
            try:
                ended = self.step(batch, said)
            except PrefillError as error:
                ended = [(error.key, error)]
            except FAULTS as error:
                ended = [(picture, error) for picture in said if rows == 1]
                if rows > 1:
                    ahead.again(said)
                rows, said = max(1, rows // 2), {}
                batch = self.batch(rows)
            self.spent[i] += time.perf_counter() - started
            for picture, text in ended:
                said.pop(picture, None)
                yield picture, text

    def batch(self, rows: int) -> ContinuousBatch:
        return ContinuousBatch(self.captioner.model, max_num_seqs=rows, eos_token_id=self.captioner.tokenizer.eos_token_id)

    def step(self, batch: ContinuousBatch, said: dict[str, list[int]]) -> list[tuple[str, str]]:
        """Add to what was said of each picture; those whose answer has ended."""
        ended = []
        for token in batch.step():
            if token.error:
                ended.append((token.key, token.error))
                continue
            if token.finished != "stop":
                said[token.key].append(token.token_id)
            if token.finished:
                ended.append((token.key, self.captioner.tokenizer.decode(said[token.key])))
        return ended

    def prepare(self, picture: str) -> EncodedPrompt | Exception:
        try:
            if os.path.exists(picture) and not os.path.isfile(picture):
                raise ImageError("not a file")  # to open a pipe may take forever
            ids, images = self.captioner.prepare(picture, self.prompt)
            self.captioner.model.validate_length(len(ids), self.options["max_new_tokens"])
            return ids, images
        except FAULTS as error:
            return error

    def summary(self) -> str:
        return f"{self.done:,} captioned in {self.seconds:.0f} s ({60 * self.done / self.seconds:,.0f} a minute)"


def together(lanes: Sequence[Iterator[tuple]], waiting: int) -> Iterator[tuple]:
    """What all of them yield, each in a thread of its own, as it is found; what one raises ends the others.

    No more than waiting answers wait for who writes them: a run that is stopped loses little.
    """
    found, running, stopped = SimpleQueue(), len(lanes), Event()
    room = Semaphore(waiting)

    def follow(lane: Iterator[tuple]) -> None:
        end = None
        try:
            for answer in lane:
                room.acquire()
                if stopped.is_set():
                    break
                found.put(answer)
        except BaseException as error:
            end = error
        found.put(end)

    threads = [Thread(target=follow, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    try:
        while running:
            if isinstance(answer := found.get(), tuple):
                yield answer
                room.release()
            else:
                running -= 1
                if answer is not None:
                    raise answer
    finally:
        stopped.set()
        room.release(len(lanes))
        for thread in threads:
            thread.join()


def reason_of(error: Exception, picture: str) -> str:
    """Why a picture has no caption, without its name."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or "not enough memory"
    return " ".join(text.split()).removeprefix(f"{printable(picture)}: ")
