"""Source: examples by index. Stream: examples in sequence. ReadOptions: how to read either."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from nanovlm import PROMPT
from nanovlm.data.examples import Example, ExampleError, ImageSource
from nanovlm.errors import DataError

SHUFFLE_WINDOW = 256  # rows of a stream held in memory to be shuffled
INSTALL_DATA = "pip install 'nanovlm[data]'"
COLUMN_OPTIONS = ("prompt", "text_column", "prompt_column")  # the options that apply to records of plain columns


@dataclass(frozen=True)
class ReadOptions:
    """How to read sources, where the files themselves do not decide it."""

    prompt: str = PROMPT  # the question for data that have captions only
    images: str | None = None  # folder of the images that a JSON file names
    text_column: str | None = None
    prompt_column: str | None = None
    min_ratings: Mapping[str, float] = field(default_factory=dict)  # rating name -> minimum, of the_cauldron's turns
    stream: bool = False  # read a Hub dataset while it downloads
    skip_errors: bool = False  # leave out examples that cannot be used


@dataclass(frozen=True, eq=False)
class Source:
    """Examples by index: source[i] makes one from records[i]; its images are opened only when it is encoded."""

    path: str
    records: Sequence[Any]
    make_example: Callable[[Any, str], Example]  # (record, name) -> Example
    keys: Sequence[str] | None = None  # examples of one key, such as an image's path, are held out together
    named_by_key: bool = False
    supported_options: Collection[str] = ()  # the fields of ReadOptions that apply to this source
    record_numbers: Sequence[int] | None = None  # the records' numbers in their file, if some were left out
    endless: bool = False  # generated: too many examples to count or to hold out
    nbytes: int | None = None  # size of all records, if making an example reads its images

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> Example:
        return self.make_example(self.records[i], self.name(i))

    def name(self, i: int) -> str:
        """The example's name in messages: its image's path, or path[number] for a record of a file."""
        if self.named_by_key and self.keys:
            return os.path.join(self.path, self.keys[i])
        return f"{self.path}[{self._record_number(i)}]"

    def key(self, i: int) -> str:
        """The string whose hash decides whether the example is held out."""
        return self.keys[i] if self.keys else str(self._record_number(i))

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
        sizes = [_image_size(image) for image in example.images]
        return repr((self.key(i), example.qa_pairs, example.multi_turn, sizes))

    def _record_number(self, i: int) -> int:
        return i if self.record_numbers is None else self.record_numbers[i]


class Stream:
    """Examples in sequence, for data that are too large or too remote for random access.

    As for a Source, the order is a pure function of (seed, epoch, position), but shuffled within a window only. A
    position is reached by reading on from an earlier one, else by reading from the start; so resuming a training run
    rereads what it had read.
    """

    endless = True

    def __init__(
        self,
        path: str,
        rows: Callable[[], Iterable[Any]],
        make_example: Callable[[Any, str], Example],
        keep_row: Callable[[Any], bool],
        keep_key: Callable[[str], bool] | None = None,
        supported_options: Collection[str] = (),
    ):
        self.path, self.rows, self.make_example = path, rows, make_example
        self.keep_row, self.keep_key, self.supported_options = keep_row, keep_key, supported_options
        self._seed: str | None = None
        self._position = -1
        self._current: tuple[int, Any] | None = None
        self._order: Iterator[tuple[int, Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:  # an open iterator cannot be pickled: the other process starts over
        return self.__dict__ | {"_seed": None, "_position": -1, "_current": None, "_order": None}

    def filtered(self, keep_key: Callable[[str], bool]) -> "Stream":
        """The stream of the examples whose keys pass."""
        return Stream(self.path, self.rows, self.make_example, self.keep_row, keep_key, self.supported_options)

    def name(self, number: int) -> str:
        return f"{self.path}[{number}]"

    def numbered_rows(self) -> Iterator[tuple[int, Any]]:
        """Number and row of every example, unshuffled."""
        for number, row in enumerate(self.rows()):
            if (self.keep_key is None or self.keep_key(str(number))) and self.keep_row(row):
                yield number, row

    def example_at(self, position: int, seed: str) -> Example:
        """The example at a position that counts over all epochs, each of which has its own order."""
        if self._order is None or seed != self._seed or position < self._position:
            self._seed, self._position, self._order = seed, -1, self._all_epochs(seed)
        while self._position < position:
            self._current = next(self._order)
            self._position += 1
        assert self._current is not None
        number, row = self._current
        return self.make_example(row, self.name(number))

    def _all_epochs(self, seed: str) -> Iterator[tuple[int, Any]]:
        for epoch in count():
            rows = self._shuffled(Random(f"{seed} {epoch}"))
            first = next(rows, None)
            if first is None:
                raise DataError(f"{self.path} has no example to learn from")
            yield first
            yield from rows

    def _shuffled(self, rng: Random) -> Iterator[tuple[int, Any]]:
        window = []
        for row in self.numbered_rows():
            window.append(row)
            if len(window) > SHUFFLE_WINDOW:
                i = rng.randrange(len(window))
                window[i], window[-1] = window[-1], window[i]
                yield window.pop()
        rng.shuffle(window)
        yield from window


def first_few(names: Sequence[str]) -> str:
    """The first three names, for a message."""
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _image_size(image: ImageSource) -> Any:
    """Size in bytes of an image's file, (width, height) of an open image; None if it is missing, which raises later."""
    if isinstance(image, bytes):
        return len(image)
    try:
        return getattr(image, "size", None) or os.path.getsize(image)  # type: ignore[arg-type]  # a tar member has a size
    except (OSError, TypeError, ValueError):  # ValueError: a null character in a path
        return None
