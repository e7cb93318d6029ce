"""Source: examples by index, all read once at opening. Stream: examples in sequence, with a state to resume from."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b, file_digest
from itertools import count as count_from
from itertools import islice
from random import Random
from typing import Any

from nanovlm.console import count, progress_bar
from nanovlm.data.examples import Example, ExampleError, ImageSource
from nanovlm.data.records import to_example
from nanovlm.data.rows import Rows, plain_row
from nanovlm.errors import DataError, NanoVLMError, TrainingError, first_line
from nanovlm.options import ReadOptions

SHUFFLE_WINDOW = 256  # rows of a stream held in memory to be shuffled
DESCRIBED = 100  # rows of a stream that its lines are about

logger = logging.getLogger(__name__)


def digest_of(*parts: bytes) -> str:
    """A short hash in hexadecimal."""
    return blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def fraction(digest: str) -> float:
    """A number in [0, 1) that depends on the digest alone; those below a share are held out."""
    return int(digest, 16) / 16 ** len(digest)


def hash_image(image: ImageSource, known: dict[str, str] | None = None) -> str:
    """The hash of an image's bytes; ExampleError for a file that cannot be read. known has those of paths."""
    if isinstance(image, bytes):
        return digest_of(image)
    if not isinstance(image, (str, os.PathLike)):
        return digest_of(image.tobytes())
    known = {} if known is None else known
    path = os.fspath(image)
    if path not in known:
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise ExampleError(f"{path} is not a file")
            with open(path, "rb") as file:
                known[path] = file_digest(file, partial(blake2b, digest_size=12)).hexdigest()
        except (OSError, ValueError) as error:  # ValueError: a null character in a path
            if isinstance(error, ExampleError):
                raise
            raise ExampleError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return known[path]


@dataclass
class Summary:
    """What was read of a source: counts by columns, and what was left out by its kind, with its first name."""

    columns: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    without_image: list[str] = field(default_factory=list)

    def add(self, example: Example) -> None:
        self.columns[example.columns] += 1
        for what in example.left_out:
            self.left_out.setdefault(what, []).append(example.name)
        if not example.images:
            self.without_image.append(example.name)

    def lines(self) -> list[str]:
        several = len(self.columns) > 1
        columns = "; ".join(f"{text} ({n:,})" if several else text for text, n in self.columns.most_common())
        lines = [f"reading {columns}"] if columns else []
        for what, names in self.left_out.items():
            lines.append(f"not read: {what} ({count(len(names), 'record')}, the first {names[0]})")
        if self.without_image:
            lines.append(f"{len(self.without_image)} without an image, the first {self.without_image[0]}")
        return lines


@dataclass(eq=False)
class Source:
    """Examples by index: source[i] makes one from its row; its images are opened only when it is encoded."""

    path: str
    rows: Sequence[Any]
    make_example: Callable[[Any], Example]
    endless: bool = False  # generated: too many examples to count or to hold out
    usable: Sequence[int] = ()  # indices of the rows that are examples
    hashes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # of each example's images
    digests: Mapping[int, str] = field(default_factory=dict)  # of each example's texts and images
    errors: list[str] = field(default_factory=list)  # why the other rows are not
    lines: list[str] = field(default_factory=list)  # what was read, and what was left out
    reads_json: bool = False  # so that --images has an effect

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Example:
        return replace(self.make_example(self.rows[i]), hashes=self.hashes.get(i, ()))

    def keys(self, i: int) -> tuple[str, ...]:
        """What an example shares with those on its side of the split: its images, or its text if it has none."""
        return self.hashes[i] or (self.digests[i],)


def read_source(opened: Rows, options: ReadOptions, check: bool = False) -> Source:
    """The source of rows, each of which is read once. DataError for rows that cannot be used, unless they are skipped.

    With check they are counted, too, but none raises.
    """
    make_example, summary = partial(to_example, options=options), Summary()
    known: dict[str, str] = {}
    usable, hashes, digests, errors = [], {}, {}, []
    with progress_bar(len(opened.rows), "row", opened.path, delay=2, leave=False) as bar:
        for i in range(len(opened.rows)):
            bar.update()
            try:
                example = make_example(opened.rows[i])
                hashes[i] = tuple(hash_image(image, known) for image in example.images)
            except ExampleError as error:
                errors.append(str(error))
                continue
            usable.append(i)
            texts = repr((example.qa_pairs, example.multi_turn, example.learned))
            digests[i] = digest_of(texts.encode("utf-8", "surrogatepass"), *(value.encode() for value in hashes[i]))
            summary.add(example)
    path = opened.path
    source = Source(path, opened.rows, make_example, False, usable, hashes, digests, errors)
    if not usable:
        raise DataError(f"{path}: no record can be used; the first: {errors[0]}")
    if len(summary.without_image) == len(usable):
        names = ", ".join(str(name) for name in opened.rows[usable[0]] if not str(name).startswith("__"))
        raise DataError(
            f"no images found: no record of {path} names one, only {names}; --image-column names the column"
        )
    if errors and not check and not options.skip_errors:
        raise DataError(
            f"{len(errors)} of {count(len(opened.rows), 'record')} of {path} cannot be used, the first: {errors[0]}; "
            "--on-error skip goes on without them, --check-data lists all"
        )
    n_images = len({value for values in hashes.values() for value in values})
    where = f" in {opened.images}" if opened.images and opened.images != path else ""
    source.lines = [f"{count(len(usable), 'example')}, {count(n_images, 'different image')}{where}", *summary.lines()]
    source.lines += opened.notes
    read = {os.path.realpath(name) for name in known}
    if unread := [name for name in opened.listed if os.path.realpath(name) not in read]:
        source.lines.append(f"not read: {count(len(unread), 'image')}, the first {unread[0]}")
    if errors:
        source.lines.append(f"left out: {count(len(errors), 'record')}, the first: {errors[0]}")
    return source


@dataclass(eq=False)
class Stream:
    """Examples in sequence, for data that are too large or too remote for random access.

    Each of n_parts readers reads whole shards where their number allows it, else every n_parts-th row. An epoch has its
    own order of shards, and rows are shuffled in windows.
    """

    path: str
    dataset: Any  # an IterableDataset of `datasets` in Arrow's format
    options: ReadOptions
    share: float = 0.0  # examples whose images' hashes are below it are held out
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    reads_json: bool = False
    endless = True

    def read(
        self, seed: str, part: int = 0, n_parts: int = 1, state: dict[str, Any] | None = None
    ) -> Iterator[tuple[Example | ExampleError, dict[str, Any]]]:
        """Yield a part's training examples endlessly, or the error of an unusable one, each with the state after it.

        A reader that is given this state goes on behind it.
        """
        at = {"epoch": 0, "shard": 0, "window": 0, "taken": 0, "rows": None} | (state or {})
        n_shards = self.dataset.num_shards
        by_shard = n_shards % n_parts == 0
        for epoch in count_from(at["epoch"]):
            order = list(range(part, n_shards, n_parts) if by_shard else range(n_shards))
            Random(f"{seed} {epoch}").shuffle(order)
            is_empty = at["shard"] == at["window"] == at["taken"] == 0
            for turn in range(at["shard"], len(order)):
                here = {"epoch": epoch, "shard": turn}
                for window, start, rows in self._windows(order[turn], at["window"], at["rows"]):
                    Random(f"{seed} {epoch} {order[turn]} {window}").shuffle(rows)
                    for taken in range(at["taken"], len(rows)):
                        if not by_shard and taken % n_parts != part:
                            continue
                        example = self._example(rows[taken])
                        if isinstance(example, ExampleError) or not any(self._is_held_out(example)):
                            is_empty = False
                            yield example, here | {"window": window, "taken": taken + 1, "rows": start}
                    at["taken"] = 0
                at = at | {"window": 0, "rows": None}
            at = at | {"shard": 0}
            if is_empty:
                reader = f" for process {part + 1} of the {n_parts} that read it" if n_parts > 1 else ""
                raise DataError(f"{self.path} has no example to learn from{reader}")

    def held_out(self, limit: int) -> list[Example]:
        """The first examples that are held out: all of their images are."""
        found = (example for example in self.all_rows() if isinstance(example, Example))
        return list(islice((example for example in found if all(self._is_held_out(example))), limit))

    def all_rows(self) -> Iterator[Example | ExampleError]:
        """The example of every row, unshuffled, or why there is none."""
        for shard in range(self.dataset.num_shards):
            for _, _, rows in self._windows(shard, 0, None):
                yield from map(self._example, rows)

    def _is_held_out(self, example: Example) -> list[bool]:
        keys = example.hashes or (digest_of(repr(example.qa_pairs).encode("utf-8", "surrogatepass")),)
        return [fraction(key) < self.share for key in keys]

    def _example(self, row: Mapping[str, Any]) -> Example | ExampleError:
        try:
            example = to_example(row, self.options)
            return replace(example, hashes=tuple(map(hash_image, example.images)))
        except ExampleError as error:
            return error

    def _windows(self, shard: int, window: int, state: Any) -> Iterator[tuple[int, Any, list[Any]]]:
        """The windows of a shard from one on: its number, the state of `datasets` before it, and its rows."""
        try:
            data = self.dataset.shard(self.dataset.num_shards, shard)
            if state is not None:
                data.load_state_dict(state)
            tables = data.iter(batch_size=1)  # iter(data) would divide shards among DataLoader workers
            for number in count_from(window):
                start = data.state_dict()
                rows = [row for table in islice(tables, SHUFFLE_WINDOW) for row in table.to_pylist()]
                if not rows:
                    return
                names = (f"{self.path}[{shard}:{number * SHUFFLE_WINDOW + i}]" for i in range(len(rows)))
                features = self.dataset.features
                yield number, start, [plain_row(row, features, "", name) for row, name in zip(rows, names)]
        except NanoVLMError:
            raise
        except Exception as error:  # of many kinds, from DNS to a broken file
            raise TrainingError(
                f"the stream of {self.path} broke off ({first_line(error)}); rerun the same command to resume from the "
                "last checkpoint"
            ) from None


def open_stream(opened: Rows, options: ReadOptions) -> Stream:
    """The stream of an IterableDataset; its first rows say what is read."""
    stream, summary = Stream(opened.path, opened.stream, options), Summary()
    for example in islice(stream.all_rows(), DESCRIBED):
        if isinstance(example, ExampleError):
            stream.errors.append(str(example))
        else:
            summary.add(example)
    if not summary.columns:
        raise DataError(f"no images found: {stream.errors[0] if stream.errors else f'{opened.path} has no rows'}")
    n = summary.columns.total()
    if len(summary.without_image) == n:
        raise DataError(
            f"no images found: the first {n} records of {opened.path} name none; --image-column names the column"
        )
    stream.lines = [f"streamed; of the first {n}: {line}" for line in summary.lines()] + opened.notes
    if stream.errors and not options.skip_errors:
        raise DataError(f"{stream.errors[0]}; --on-error skip goes on without it")
    return stream
