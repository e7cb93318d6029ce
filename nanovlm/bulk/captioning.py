"""Captions of many images with one model.

Threads read and preprocess images while workers decode others, and a finished caption makes room for the next image.
A large model has one worker. A small model on a CPU has a worker per core, each with a continuous batch of its own.
"""

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import cast

import torch

from models.inference.continuous_batching import ContinuousBatch
from models.inference.requests import LogitsProcessor, PrefillError, TokenOutput
from models.inference.serving_caches import TiledImage
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
REGROWTH = 1 / 32  # images, by which a batch that was reduced for lack of memory grows with each answer

Key = tuple[str, int]  # of a sequence: its image and the number of its prompt
Prepared = tuple[list[list[int]], TiledImage]  # the ids of each prompt, and the tiles of what they are about
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
        self.start_ids = captioner.start_ids(self.options.start_with)
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
        elif len(self.options.prompts) > 1:
            file = self.captioner.load_image(file)
        encoded = [self.captioner.prepare(file, prompt) for prompt in self.options.prompts]
        prompts = [ids + self.start_ids for ids, _ in encoded]
        self.captioner.inference.validate_length(max(map(len, prompts)), self.options.max_new_tokens)
        return prompts, TiledImage(torch.cat(encoded[0][1]))


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
        self.limit: float = bulk.batch_size  # images that run at once; halved when memory runs out
        self.token_ids: dict[Key, list[int]] = {}  # of each sequence in the batch
        self.answers: dict[str, dict[int, str]] = {}  # of images that have some, by the prompts' numbers
        self.postponed: list[str] = []  # images that did not fit into memory beside the others
        self.batch = self._new_batch()

    def run(self) -> Generator[list[Result], None, None]:
        while True:
            yield from self._admit()
            if self.token_ids:
                yield from self._step()
            elif self.postponed:
                self._restart([], 1)
            else:
                return

    def _new_batch(self) -> ContinuousBatch:
        return ContinuousBatch(
            self.captioner.inference,
            max_num_seqs=self.bulk.batch_size,
            eos_token_id=self.captioner.tokenizer.eos_token_ids,
        )

    def _admit(self) -> Iterator[list[Result]]:
        """Fill the free rows with images that are prepared; wait for one only if nothing runs."""
        if self.limit - len(self.token_ids) < MIN_JOIN_FRACTION * self.limit:
            return
        while len(self.token_ids) < int(self.limit):
            taken = self.prefetch.take(wait=not self.token_ids)
            if taken is None:
                return
            path, future = taken
            try:
                prompts, image = future.result()
            except Exception as error:
                yield [(path, image_failure(error))]
                continue
            grammar: LogitsProcessor | None = None
            if self.options.schema is not None:
                (grammar,) = self.captioner.structured_output.make_processors(self.options.schema, 1)
            for number, ids in enumerate(prompts):
                self.batch.add(
                    (path, number),
                    torch.tensor(ids),
                    [image],  # which is encoded once
                    max_new_tokens=self.options.max_new_tokens,
                    sampling=self.options.sampling,
                    logits_processor=grammar,
                )
                self.token_ids[path, number] = []

    def _step(self) -> Iterator[list[Result]]:
        """Decode one token of every image in the batch; yield those that have finished, then those that failed."""
        started = time.perf_counter()
        try:
            outputs, failures = self._decode()
        finally:
            self.bulk.model_seconds[self.index] += time.perf_counter() - started
        if finished := [result for output in outputs for result in self._collect(output)]:
            yield finished
        for path, error in failures.items():
            self._remove(path)
            yield [(path, image_failure(error))]

    def _remove(self, path: str) -> None:
        """Take all sequences of an image out of the batch."""
        for key in [key for key in self.token_ids if key[0] == path]:
            self.batch.cancel(key)
            del self.token_ids[key]
        self.answers.pop(path, None)

    def _decode(self) -> tuple[list[TokenOutput], dict[str, BaseException | None]]:
        """The next tokens, and the errors of images that have none."""
        try:
            outputs = self.batch.step()
        except PrefillError as error:
            return [], self._prefill_failed(cast(Key, error.key)[0], error.__cause__)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return [], self._reduce_batch(error)
        return outputs, {cast(Key, output.key)[0]: output.error for output in outputs if output.error}

    def _collect(self, output: TokenOutput) -> list[Result]:
        """Add a token to its sequence; the image's caption if that was the last token of all its answers."""
        path, number = key = cast(Key, output.key)
        if key not in self.token_ids:  # another answer about this image failed in the same step
            return []
        if output.finished != "error":
            self.token_ids[key].append(output.token_id)
        if output.finished in (None, "error"):
            return []
        self.limit = min(self.limit + REGROWTH, self.bulk.batch_size)
        self.bulk.repetitions[self.index] += output.finished == "repetition"
        text = self.captioner.answer_text(self.token_ids.pop(key), self.options)
        if self.options.schema is not None:
            try:
                self.captioner.structured_output.parse(text)
            except InputError as error:
                return [(path, error)]
        self.answers.setdefault(path, {})[number] = text
        if any(other == path for other, _ in self.token_ids):
            return []
        answers = self.answers.pop(path)
        if not any(text.removeprefix(self.options.start_with.rstrip()).strip() for text in answers.values()):
            return [(path, EmptyCaptionError("the model's caption is empty"))]
        if isinstance(self.options.prompt, str):
            return [(path, text)]
        named = {prompt: answers[i] for i, prompt in enumerate(self.options.prompt)}
        return [(path, json.dumps(named, ensure_ascii=False))]

    def _prefill_failed(self, path: str, error: BaseException | None) -> dict[str, BaseException | None]:
        """Postpone an image for which there is no memory beside others; alone, it fails."""
        if error is None or not is_out_of_memory(error) or {other for other, _ in self.token_ids} == {path}:
            return {path: error}
        self._remove(path)
        self.postponed.append(path)
        self.limit = len(self.token_ids)
        return {}

    def _reduce_batch(self, error: Exception) -> dict[str, BaseException | None]:
        """Start again with half as many images after running out of memory; an image that was alone fails."""
        paths = list(dict.fromkeys(path for path, _ in self.token_ids))
        self._restart(paths if len(paths) > 1 else [], max(1, len(paths) // 2))
        return {path: error for path in paths if len(paths) == 1}

    def _restart(self, paths: list[str], batch_size: int) -> None:
        """Prepare these and the postponed images once more, for a new and smaller batch."""
        self.prefetch.put_back(reversed(paths + self.postponed))
        self.limit = batch_size
        self.batch, self.token_ids, self.answers, self.postponed = self._new_batch(), {}, {}, []


def image_failure(error: BaseException | None) -> Exception:
    """The error, if it concerns one image, its file or its size; any other is a bug, and raised."""
    if isinstance(error, Exception) and (isinstance(error, (NanoVLMError, OSError)) or is_out_of_memory(error)):
        return error
    raise error or RuntimeError("an image failed without an error")


def failure_reason(error: Exception, path: str) -> str:
    """Why an image has no caption, on one line and without its name."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or "not enough memory"
    return " ".join(text.split()).removeprefix(f"{printable(path)}: ")
