"""Captions of many images with one model.

Threads read and preprocess images while workers decode others, and a finished caption makes room for the next image.
A large model has one worker. A small model on a CPU has a worker per core, each with a continuous batch of its own.
"""

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager

import torch

from models.inference.request import Request
from nanovlm.bulk.inputs import check_file
from nanovlm.bulk.options import BulkOptions
from nanovlm.bulk.prefetch import Prefetch, merge_iterators
from nanovlm.captioner import Captioner, ImageInput
from nanovlm.device import available_cores
from nanovlm.errors import ImageError, InputError, NanoVLMError, is_out_of_memory
from nanovlm.processing.image_loading import printable
from nanovlm.processing.video import Video

BATCH_SIZE = 16  # images per worker, where an image becomes several tiles
SINGLE_TILE_BATCH_SIZE = 128
MIN_JOIN_FRACTION = 1 / 4  # of a batch must be free before images join: prefilled together, they are faster
MAX_PREFETCH_THREADS = 8
SMALL_MODEL_BYTES = 2**24  # of weights; below, products are too short to be divided among cores
MAX_WORKERS = 4  # of a small model: kernels run in parallel, Python does not
PIXEL_BUDGET = 2**30  # bytes of preprocessed images that may wait for the model

Prepared = list[Request]  # of each prompt
Result = tuple[str, str | Exception]  # path, and its caption or the reason why there is none


class EmptyCaptionError(ImageError):
    """A caption without a word; the image counts as failed."""


class BulkCaptioner:
    """Captions many images, and measures how long the model runs.

    read opens an image by its name, which is a path without it; the threads that preprocess images call it. cores is
    how many this process may use, by default all available ones.
    """

    def __init__(
        self,
        captioner: Captioner,
        options: BulkOptions | None = None,
        *,
        workers: int | None = None,
        cores: int | None = None,
        read: Callable[[str], ImageInput] | None = None,
    ):
        self.captioner, self.options = captioner, options or BulkOptions()
        as_video, tiles = self.options.as_video, captioner.processor.max_tiles_per_image
        self.tiles = self.options.max_frames if as_video else tiles
        self.batch_size = self.options.batch_size or (BATCH_SIZE if self.tiles > 1 else SINGLE_TILE_BATCH_SIZE)
        self.cores, self.read = cores or available_cores(), read or check_file
        self.n_workers = workers or default_workers(captioner, self.cores)
        self.seconds = 0.0  # that all calls of captions took
        self.model_seconds = [0.0] * self.n_workers
        self.repetitions = [0] * self.n_workers  # captions that were ended because they repeated themselves

    @property
    def utilization(self) -> float:
        """The share of time in which the model ran, mean over workers."""
        return sum(self.model_seconds) / (self.seconds * self.n_workers) if self.seconds else 0.0

    def captions(self, paths: Iterable[str], window: int | None = None) -> Generator[Result, None, None]:
        """Yield each path with its caption, or with the error that left it without one, as they finish.

        Errors of one image are those of its file (`ImageError`, `OSError`), of its size, or a lack of memory for it
        alone. Any other error is a bug: it is raised, after the captions that were finished. At most window images
        wait for the model. Close the generator to stop early.
        """
        started = time.perf_counter()
        threads = min(MAX_PREFETCH_THREADS, self.cores)
        window = window or self.default_window()
        try:
            with self._worker_threads(), Prefetch(paths, self._prepare, window, threads) as prefetch:
                runs = [_Worker(self, i, prefetch).run() for i in range(self.n_workers)]
                with closing(merge_iterators(runs, self.batch_size) if len(runs) > 1 else runs[0]) as batches:
                    for results in batches:
                        yield from results
        finally:
            self.seconds += time.perf_counter() - started

    def default_window(self) -> int:
        """How many images may wait for the model: some batches, within the pixel budget."""
        image_bytes = self.tiles * 3 * self.captioner.inference.cfg.vit_img_size**2 * 4
        return max(2, min(4 * self.batch_size, PIXEL_BUDGET // image_bytes))

    @contextmanager
    def _worker_threads(self) -> Iterator[None]:
        """Let each of several workers compute with one thread."""
        before = torch.get_num_threads()
        torch.set_num_threads(1 if self.n_workers > 1 else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _prepare(self, path: str) -> Prepared:
        file = self.read(path)
        if self.options.as_video:
            file = Video.read(str(file), self.options.max_frames)
        return self.captioner.requests(file, self.options.prompts, self.options)


def default_workers(captioner: Captioner, cores: int | None = None) -> int:
    """One worker, or for a small model on a CPU one for each of some cores."""
    model = captioner.inference
    small = model.device.type == "cpu" and sum(weight.nbytes for weight in model.parameters()) < SMALL_MODEL_BYTES
    return min(cores or available_cores(), MAX_WORKERS) if small else 1


class _Worker:
    """A continuous batch: takes prepared images, decodes them together, and yields results as they finish."""

    def __init__(self, bulk: BulkCaptioner, index: int, prefetch: Prefetch[Prepared]):
        self.bulk, self.index, self.prefetch = bulk, index, prefetch
        self.captioner, self.options = bulk.captioner, bulk.options
        self.paths: dict[Request, str] = {}  # of requests that wait or run
        self.images: dict[str, Prepared] = {}  # the requests of images that have not finished
        self.batch = self.captioner.batch(bulk.batch_size)

    def run(self) -> Generator[list[Result], None, None]:
        while True:
            yield from self._admit()
            if not self.paths:
                return
            yield from self._step()

    def _admit(self) -> Iterator[list[Result]]:
        """Fill the free rows with images that are prepared; wait for one only if nothing runs."""
        if self.bulk.batch_size - len(self.paths) < MIN_JOIN_FRACTION * self.bulk.batch_size:
            return
        while len(self.paths) < self.bulk.batch_size:
            taken = self.prefetch.take(wait=not self.paths)
            if taken is None:
                return
            path, future = taken
            try:
                self.images[path] = requests = future.result()
            except Exception as error:
                yield [(path, image_failure(error))]
                continue
            for request in requests:
                self.batch.add(request)
                self.paths[request] = path

    def _step(self) -> Iterator[list[Result]]:
        """Decode one token of every image in the batch; yield those that have finished, then those that failed."""
        started = time.perf_counter()
        outputs = self.batch.step()
        self.bulk.model_seconds[self.index] += time.perf_counter() - started
        failed = {path: output.error for output in outputs if output.error and (path := self.paths.get(output.request))}
        for path in failed:
            for request in self.images.pop(path):
                self.batch.cancel(request)
                self.paths.pop(request, None)
        if finished := [result for output in outputs if output.finished for result in self._collect(output.request)]:
            yield finished
        for path, error in failed.items():
            yield [(path, image_failure(error))]

    def _collect(self, request: Request) -> list[Result]:
        """The image's caption if this was the last of its requests to finish."""
        if (path := self.paths.pop(request, None)) is None:  # another answer about this image failed in the same step
            return []
        self.bulk.repetitions[self.index] += request.finished == "repetition"
        if any(not other.finished for other in self.images[path]):
            return []
        texts = [self.captioner.text(other, self.options) for other in self.images.pop(path)]
        if self.options.schema is not None:
            try:
                self.captioner.structured_output.parse(texts[0])
            except InputError as error:
                return [(path, error)]
        if not any(text.removeprefix(self.options.start_with.rstrip()).strip() for text in texts):
            return [(path, EmptyCaptionError("the model's caption is empty"))]
        if isinstance(self.options.prompt, str):
            return [(path, texts[0])]
        return [(path, json.dumps(dict(zip(self.options.prompt, texts)), ensure_ascii=False))]


def image_failure(error: BaseException | None) -> Exception:
    """The error, if it concerns one image, its file or its size; any other is a bug, and raised."""
    if isinstance(error, Exception) and (isinstance(error, (NanoVLMError, OSError)) or is_out_of_memory(error)):
        return error
    raise error or RuntimeError("an image failed without an error")


def failure_reason(error: Exception, path: str) -> str:
    """Why an image has no caption, on one line and without its name."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or "not enough memory"
    return " ".join(text.split()).removeprefix(f"{printable(path)}: ")
