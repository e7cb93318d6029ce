"""Captions of many pictures in one go.

Threads read and resize pictures while the model speaks of others; a caption that has ended makes room for the next.
"""

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import torch

from models.continuous import ContinuousBatch, Unread
from nanovlm.captioner import Captioner
from nanovlm.images import PictureError, printable
from nanovlm.processor import Inputs
from nanovlm.progress import Progress

BATCH_SIZE, BATCH_OF_SINGLES = 16, 128  # pictures; where each of them is one image only
CLUMP = 1 / 4  # of a batch: where less of it is free, the next pictures wait, for together they are read faster
CORES = os.cpu_count() or 1
MOST_WORKERS = 8
SMALL = 2**24  # bytes of weights, below which products are too short to be worth dividing among cores
ROOM = 2**30  # bytes of pixels that may wait for the model
FAULTS = (ValueError, MemoryError, OSError, RuntimeError)  # of one picture; torch's lack of memory is the last


class Run:
    """Captions of many pictures, and what they took."""

    def __init__(self, captioner: Captioner, prompt: str, options: dict[str, Any]):
        self.captioner, self.prompt, self.options = captioner, prompt, options
        self.done, self.busy, self.seconds = 0, 0.0, 0.0  # captions; seconds in the model, and in all
        self.images = captioner.processor.most_images
        self.batch_size = BATCH_SIZE if self.images > 1 else BATCH_OF_SINGLES
        weights = captioner.model.parameters()
        self.small = captioner.model.device.type == "cpu" and sum(w.nbytes for w in weights) < SMALL

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
        """Give a small model one core, and the pictures the others."""
        before = torch.get_num_threads()
        torch.set_num_threads(1 if self.small else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def window(self, rows: int) -> int:
        """How many pictures may wait for the model: for some batches, but no more than there is room for."""
        return max(2, min(4 * rows, ROOM // (self.images * 3 * self.captioner.model.cfg.vit_img_size**2 * 4)))

    def answers(self, pictures: Iterable[str], rows: int) -> Iterator[tuple[str, str | Exception]]:
        """Each picture with its answer, or why there is none, as they are found; so many rows run at once.

        What is too much for the memory begins anew in half as many rows.
        """
        workers = min(MOST_WORKERS, max(1, CORES - self.small))
        pool, pictures = ThreadPoolExecutor(workers), iter(pictures)
        prepared: deque[tuple[str, Future]] = deque()
        batch, said = self.batch(rows), {}  # each picture's ids
        try:
            while True:
                for picture in islice(pictures, max(0, self.window(rows) - len(prepared))):
                    prepared.append((picture, pool.submit(self.prepare, picture)))
                if not (prepared or said):
                    return
                joining = rows - len(said) >= CLUMP * rows
                while joining and prepared and len(said) < rows and (not said or prepared[0][1].done()):
                    picture, future = prepared.popleft()
                    if isinstance(row := future.result(), Exception):
                        yield picture, row
                    else:
                        ids, (images,) = row
                        batch.add(picture, torch.tensor(ids), images, **self.options)
                        said[picture] = []
                if not said:
                    continue
                started = time.perf_counter()
                try:
                    ended = self.step(batch, said)
                except Unread as error:
                    ended = [(error.key, error)]
                except FAULTS as error:
                    ended = [(picture, error) for picture in said if rows == 1]
                    if rows > 1:
                        prepared.extendleft((picture, pool.submit(self.prepare, picture)) for picture in said)
                    rows, said = max(1, rows // 2), {}
                    batch = self.batch(rows)
                self.busy += time.perf_counter() - started
                for picture, text in ended:
                    said.pop(picture, None)
                    yield picture, text
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def batch(self, rows: int) -> ContinuousBatch:
        return ContinuousBatch(self.captioner.model, rows=rows, eos_token_id=self.captioner.tokenizer.eos_token_id)

    def step(self, batch: ContinuousBatch, said: dict[str, list[int]]) -> list[tuple[str, str]]:
        """Add to what was said of each picture; those whose answer has ended."""
        ended = []
        for token in batch.step():
            if token.finished != "stop":
                said[token.key].append(token.token_id)
            if token.finished:
                ended.append((token.key, self.captioner.tokenizer.decode(said[token.key])))
        return ended

    def prepare(self, picture: str) -> Inputs | Exception:
        try:
            if os.path.exists(picture) and not os.path.isfile(picture):
                raise PictureError("not a file")  # to open a pipe may take forever
            ids, images = self.captioner.prepare(picture, self.prompt)
            self.captioner.model.check_room(len(ids), self.options["max_new_tokens"])
            return ids, images
        except FAULTS as error:
            return error

    def summary(self) -> str:
        return f"{self.done:,} captioned in {self.seconds:.0f} s ({60 * self.done / self.seconds:,.0f} a minute)"


def reason_of(error: Exception, picture: str) -> str:
    """Why a picture has no caption, without its name."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or "not enough memory"
    return " ".join(text.split()).removeprefix(f"{printable(picture)}: ")
