"""Source and Stream: examples by number and examples by turn; Reading: what a person said about them."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from nanovlm import PROMPT
from nanovlm.data.examples import Example, ExampleError
from nanovlm.errors import DataError

EXTENSIONS = {
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif",
}  # fmt: skip
WINDOW = 256  # rows of a stream that wait in memory to be shuffled
EXTRA = "pip install 'nanovlm[data]'"


COLUMNS = ("prompt", "text_column", "prompt_column")  # what a source of plain columns obeys


@dataclass(frozen=True)
class ReadOptions:
    """How to read sources, where looking does not tell."""

    prompt: str = PROMPT  # asked where there are captions but no questions
    images: str | None = None  # the folder of the pictures that a JSON file names
    text_column: str | None = None
    prompt_column: str | None = None
    min_ratings: Mapping[str, float] = field(default_factory=dict)  # of the_cauldron's and FineVision's turns
    stream: bool = False  # read a Hub data set while it is downloaded
    skip: bool = False  # leave bad examples out


class Source:
    """Examples by number: source[i] makes one, and its pictures are opened only when it is encoded.

    keys, if given, are what the examples are about, a picture's path say: whatever has the same key is held out
    together. obeys names the fields of Reading that mean something here; numbers are those of the records in their
    file, where some were left out. An endless source has more examples than anybody would count or hold out. Where
    making an example reads its pictures, nbytes is the size of all records.
    """

    def __init__(
        self,
        path: str,
        records: Sequence[Any],
        example: Callable[[Any, str], Example],
        keys: Sequence[str] | None = None,
        named_by_key: bool = False,
        obeys: Collection[str] = (),
        numbers: Sequence[int] | None = None,
        endless: bool = False,
        nbytes: int | None = None,
    ):
        self.path, self.records, self.example = path, records, example
        self.keys, self.named_by_key, self.obeys = keys, named_by_key, obeys
        self.numbers = range(len(records)) if numbers is None else numbers
        self.endless, self.nbytes = endless, nbytes

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> Example:
        return self.example(self.records[i], self.name(i))

    def name(self, i: int) -> str:
        """What to call an example: a picture's path, or its number in a file."""
        return os.path.join(self.path, self.keys[i]) if self.named_by_key else f"{self.path}[{self.numbers[i]}]"

    def key(self, i: int) -> str:
        """What decides whether an example is held out."""
        return self.keys[i] if self.keys else str(self.numbers[i])

    def trace(self, i: int) -> str:
        """What tells an example from what it was before a change, where cheap: its words and its pictures' sizes.

        Not when a file was written: to copy a folder changes no example.
        """
        if self.nbytes is not None:
            return f"{self.key(i)} of {self.nbytes}"
        try:
            example = self[i]
        except ExampleError as error:
            return f"{self.key(i)}: {error}"
        return repr((self.key(i), example.answers, example.chain, [_size(picture) for picture in example.pictures]))


class Stream:
    """Examples one after another, for data that is too large or too far away to look one up.

    Their order is a pure function of (seed, epoch, position) like a Source's, shuffled within a window only, but it
    costs reading: a place is reached from an earlier one, else by reading from the start, which is how a resumed
    training finds its place again.
    """

    endless = True

    def __init__(
        self,
        path: str,
        rows: Callable[[], Iterable[Any]],
        example: Callable[[Any, str], Example],
        wanted: Callable[[Any], bool],
        kept: Callable[[str], bool] | None = None,
        obeys: Collection[str] = (),
    ):
        self.path, self.rows, self.example, self.wanted, self.kept = path, rows, example, wanted, kept
        self.obeys = obeys
        self._seed, self._place, self._last, self._order = None, -1, None, None

    def __getstate__(self):  # an open iterator stays at home: another process reads from the start
        return self.__dict__ | {"_seed": None, "_place": -1, "_last": None, "_order": None}

    def only(self, kept: Callable[[str], bool]) -> "Stream":
        """The stream of those examples whose keys are kept."""
        return Stream(self.path, self.rows, self.example, self.wanted, kept, self.obeys)

    def name(self, number: int) -> str:
        return f"{self.path}[{number}]"

    def numbered(self) -> Iterator[tuple[int, Any]]:
        """Number and row of every example, as they come."""
        for number, row in enumerate(self.rows()):
            if (self.kept is None or self.kept(str(number))) and self.wanted(row):
                yield number, row

    def at(self, place: int, seed: str) -> Example:
        """The example at a place counted over all epochs, each of which has an order of its own."""
        if seed != self._seed or place < self._place:
            self._seed, self._place, self._order = seed, -1, self._endless(seed)
        while self._place < place:
            self._last = next(self._order)
            self._place += 1
        number, row = self._last
        return self.example(row, self.name(number))

    def _endless(self, seed: str) -> Iterator[tuple[int, Any]]:
        for epoch in count():
            items = self._shuffled(Random(f"{seed} {epoch}"))
            if (first := next(items, None)) is None:
                raise DataError(f"{self.path} has no example to learn from")
            yield first
            yield from items

    def _shuffled(self, rng: Random) -> Iterator[tuple[int, Any]]:
        window = []
        for item in self.numbered():
            window.append(item)
            if len(window) > WINDOW:
                i = rng.randrange(len(window))
                window[i], window[-1] = window[-1], window[i]
                yield window.pop()
        rng.shuffle(window)
        yield from window


def _size(picture: Any) -> int | None:
    """Bytes of a picture's file; None if there is none, which is an error only when it is opened."""
    if isinstance(picture, bytes):
        return len(picture)
    try:
        return getattr(picture, "size", None) or os.path.getsize(picture)  # a tar's member knows it
    except (OSError, TypeError, ValueError):
        return None
