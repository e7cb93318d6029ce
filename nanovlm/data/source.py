"""Source: examples by index. Stream: examples in sequence, in parts. ReadOptions: how to read either."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from random import Random
from typing import Any

from PIL import Image

from nanovlm.data.examples import Example, ExampleError, ImageSource
from nanovlm.errors import DataError, MissingCaptionsError, NanoVLMError, TrainingError, first_line
from nanovlm.options import ReadOptions

SHUFFLE_WINDOW = 256  # rows of a stream held in memory to be shuffled

MakeExample = Callable[[Any, str], Example]  # (record, name) -> Example


@dataclass(frozen=True, eq=False)
class Source:
    """Examples by index: source[i] makes one from its record; its images are opened only when it is encoded."""

    path: str
    records: Sequence[Any]
    make_example: MakeExample
    keys: Sequence[str] | None = None  # of each record; those of one key, as an image's path, are held out together
    named_by_key: bool = False
    supported_options: Collection[str] = ()  # the fields of ReadOptions that apply to this source
    endless: bool = False  # generated: too many examples to count or to hold out
    nbytes: int | None = None  # size of all records, if making an example reads its images

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> Example:
        return self.make_example(self.record(i), self.name(i))

    def record(self, i: int) -> Any:
        return self.records[i]

    def name(self, i: int) -> str:
        """The example's name in messages: its image's path, or path[number] for a record of a file."""
        return os.path.join(self.path, self.key(i)) if self.named_by_key else f"{self.path}[{i}]"

    def key(self, i: int) -> str:
        """The string whose hash decides whether the example is held out."""
        return self.keys[i] if self.keys else str(i)

    def fingerprint(self, i: int) -> str:
        """A string that changes with the example's text and its images' sizes, but not when files are copied.

        Where making an example reads its images, the size of the whole dataset stands for both.
        """
        if self.nbytes is not None:
            return f"{self.key(i)} of {self.nbytes}"
        try:
            example = self[i]
        except ExampleError as error:
            return f"{self.key(i)}: {error}"
        return repr((self.key(i), example.qa_pairs, example.multi_turn, [_size(image) for image in example.images]))


def _size(image: ImageSource) -> Any:
    """Size in bytes of an image's file, (width, height) of an open image; None if it is missing, which raises later."""
    if isinstance(image, bytes):
        return len(image)
    try:
        return image.size if isinstance(image, Image.Image) else os.path.getsize(image)
    except (OSError, ValueError):  # ValueError: a null character in a path
        return None


def captioned_source(
    path: str,
    samples: Mapping[str, Any],
    has_caption: Callable[[Any], bool],
    lack: str,
    make_example: MakeExample,
    options: ReadOptions,
    supported: Collection[str],
) -> Source:
    """A source of the samples, by key, that have a caption.

    MissingCaptionsError, which says what the others lack, if there are some that are not to be skipped, or no sample is
    left.
    """
    complete = {key: sample for key, sample in samples.items() if has_caption(sample)}
    if not complete or (len(complete) < len(samples) and not options.skip_errors):
        missing = [key for key in samples if key not in complete]
        skip = ", or leave the images out with --on-error skip" if complete else ""
        raise MissingCaptionsError(
            f"captions missing: {len(missing)} of {len(samples)} images in {path} have no {lack}: "
            f"{first_few(missing)}; write them{skip}"
        )
    return Source(path, list(complete.values()), make_example, list(complete), True, supported)


def first_few(names: Sequence[str]) -> str:
    """The first three names, for a message."""
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


@dataclass(frozen=True)
class Part:
    """One of `count` parts of the data: the one that a process reads of a stream."""

    index: int = 0
    count: int = 1

    def turn_of_all(self, turn: int) -> int:
        """The position in the whole at which the part takes its turn-th example."""
        return turn * self.count + self.index


WHOLE = Part()
Row = tuple[str, Any]  # a record and its key


@dataclass(eq=False)
class Stream:
    """Examples in sequence, for data that are too large or too remote for random access.

    The order of each part is a pure function of (seed, part, position), as for a Source, but shuffled within a window
    only. Parts divide the shards among them, and the rows of those shards that are left over, so that together they
    show every example once. A position is reached by reading on from an earlier one of the part, else by reading from
    the start; so resuming a training run rereads what it had read.
    """

    path: str
    shards: Sequence[Callable[[], Iterable[Any]]]  # each reads the rows of one shard
    make_example: MakeExample
    supported_options: Collection[str] = ()
    keep_key: Callable[[str], bool] | None = None  # examples with other keys are left out
    endless = True

    def __post_init__(self) -> None:
        # for each seed and part: the last position that was read, its row, and those that follow
        self._readings: dict[tuple[str, Part], tuple[int, Row, Iterator[Row]]] = {}

    def __getstate__(self) -> dict[str, Any]:  # an open iterator cannot be pickled: the other process starts over
        return self.__dict__ | {"_readings": {}}

    def name(self, key: str) -> str:
        return f"{self.path}[{key}]"

    def keyed_rows(self) -> Iterator[Row]:
        """Key and row of every example, unshuffled."""
        for shard in range(len(self.shards)):
            yield from self._rows_of(shard, WHOLE)

    def example_at(self, position: int, seed: str, part: Part = WHOLE) -> Example:
        """The part's example at a position that counts over all epochs, each of which has its own order."""
        before = self._readings.pop((seed, part), None)  # gone if reading fails
        if before is None or position < before[0]:
            before = -1, ("", None), self._all_epochs(seed, part)
        last, row, rows = before
        if position > last:
            row = next(islice(rows, position - last - 1, None))
        self._readings[seed, part] = position, row, rows
        return self.make_example(row[1], self.name(row[0]))

    def _rows_of(self, shard: int, part: Part) -> Iterator[Row]:
        """Key and row of the part's examples in a shard; a key is the row's number, after the shard's if several."""
        try:
            for number, row in islice(enumerate(self.shards[shard]()), part.index, None, part.count):
                key = f"{shard}:{number}" if len(self.shards) > 1 else str(number)
                if self.keep_key is None or self.keep_key(key):
                    yield key, row
        except NanoVLMError:
            raise
        except Exception as error:  # of many kinds, from DNS to a broken file
            raise TrainingError(
                f"the stream of {self.path} broke off ({first_line(error)}); rerun the same command to resume from the "
                "last checkpoint"
            ) from None

    def _all_epochs(self, seed: str, part: Part) -> Iterator[Row]:
        for epoch in count():
            rows = self._shuffled(Random(f"{seed} {epoch}"), part)
            first = next(rows, None)
            if first is None:
                reader = f" for process {part.index + 1} of the {part.count} that read it" if part.count > 1 else ""
                raise DataError(f"{self.path} has no example to learn from{reader}")
            yield first
            yield from rows

    def _shuffled(self, rng: Random, part: Part) -> Iterator[Row]:
        divided = len(self.shards) - len(self.shards) % part.count
        order = [(shard, WHOLE) for shard in range(part.index, divided, part.count)]
        order += [(shard, part) for shard in range(divided, len(self.shards))]
        rng.shuffle(order)
        window = []
        for row in chain.from_iterable(self._rows_of(*shard) for shard in order):
            window.append(row)
            if len(window) > SHUFFLE_WINDOW:
                i = rng.randrange(len(window))
                window[i], window[-1] = window[-1], window[i]
                yield window.pop()
        rng.shuffle(window)
        yield from window
