"""Source: examples by index, all read once at opening. StreamedSource: examples in sequence, resumed from a state."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b, file_digest
from itertools import count as count_from
from itertools import islice
from random import Random
from typing import Any

from models.common import files
from models.common.errors import FileError
from nanovlm.console import count, progress_bar
from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.records import NO_IMAGE
from nanovlm.errors import DataError, NanoVLMError, TrainingError, first_line

SHUFFLE_WINDOW = 256  # rows of a stream held in memory to be shuffled
DESCRIBED = 100  # rows of a stream that its lines are about, and that are compared with a validation set
MAX_LABEL = 100  # characters of an answer that are compared to tell classes

APART = "write each split to a file of its own"
STREAMED = "streamed, so its size and what is wrong in later rows are not known"

Keys = tuple[str, ...]  # hashes that an example shares with those on its side of the split
Found = tuple[Example, Keys] | ExampleError


def digest_of(*parts: bytes) -> str:
    """A short hash in hexadecimal."""
    return blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def text_digest(example: Example, *keys: str) -> str:
    """The hash of an example's texts, and of the keys of its images if they are passed."""
    texts = repr([[(turn.role, turn.text, turn.learned) for turn in chat] for chat in example.chats])
    return digest_of(texts.encode("utf-8", "surrogatepass"), *map(str.encode, keys))


def keys_of(example: Example, known: dict[str, str]) -> Keys:
    """Hash the bytes of each image of an example, or its texts if it has none; known caches the hashes by path."""
    keys = []
    for image in example.images:
        if not isinstance(image, (str, os.PathLike)):
            keys.append(digest_of(image if isinstance(image, bytes) else image.tobytes()))
            continue
        path = os.fspath(image)
        if path not in known:
            try:
                with files.opened(path) as file:
                    known[path] = file_digest(file, partial(blake2b, digest_size=12)).hexdigest()
            except FileError as error:
                raise ExampleError(str(error)) from None
        keys.append(known[path])
    return tuple(keys) or (text_digest(example),)


def rank_of(keys: Iterable[str]) -> str:
    """Rank of a group of images: the lowest ranks are held out first. 24 hexadecimal digits.

    The rank of one image is its hash, that of several the hash of their lowest hash, which by itself tends to be low.
    """
    lowest, *others = sorted(set(keys))
    return digest_of(lowest.encode()) if others else lowest


def limit_of(share: float) -> str:
    """Rank below which that share of all images lies."""
    return f"{int(share * 16**24):024x}"


def _of_other_split(example: Example) -> ExampleError:
    return ExampleError(f"{example.name} is of the split {example.split!r} among others; {APART}")


@dataclass(eq=False)
class Source:
    """Examples by index: source[i] makes one from its row; its images are opened only when it is encoded."""

    path: str
    rows: Any  # a Sequence; of a StreamedSource, an IterableDataset of `datasets` in Arrow's format
    make_example: Callable[[Any], Example]
    endless: bool = False  # too many examples to count
    keys: list[Keys] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # of each example's texts and images
    answers: list[list[str]] = field(default_factory=list)  # of each example, cut to MAX_LABEL
    errors: list[str] = field(default_factory=list)  # why rows were left out
    lines: list[str] = field(default_factory=list)  # what was read, and what was left out
    folder: str = ""  # of the images, if the rows name files
    columns: Iterable[str] = ()
    listed: Sequence[str] = ()  # files of the folder; a line names each that is no image of an example
    places: frozenset[str] = frozenset()  # that images, questions and answers were read from
    split: str = ""  # of its examples, where rows name it
    weight: float | None = None  # its share of a mixture, if given

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Example:
        return self.make_example(self.rows[i])

    def part(self, indices: Sequence[int], weight: float | None = None) -> "Source":
        """Some of the examples, with the lines and errors of all."""
        lists = {name: getattr(self, name) for name in ("rows", "keys", "digests", "answers")}
        chosen: dict[str, Any] = {name: [values[i] for i in indices] for name, values in lists.items() if values}
        return replace(self, **chosen, weight=weight)

    def usable(self, errors: list[str] | None = None) -> Iterator[Example]:
        """Yield the examples; an unusable row of a stream raises, or adds its message to errors."""
        return map(self.__getitem__, range(len(self)))

    def examples_of(self, rows: Iterable[Any], known: dict[str, str]) -> Iterator[Found]:
        """Yield each row's example with its keys, or why there is none; known as in `keys_of`."""
        for row in rows:
            try:
                example = self.make_example(row)
                if self.split and example.split not in ("", self.split):
                    raise _of_other_split(example)
                yield example, keys_of(example, known)
            except ExampleError as error:
                yield error

    def scan(self, rows: Sequence[Any], skip_errors: bool) -> list[Any]:
        """Read all rows once and return those that are examples; lines say what was read. DataError if not all are."""
        known: dict[str, str] = {}
        read: list[tuple[Any, Example, Keys, str, list[str]]] = []
        with progress_bar(len(rows), "row", self.path, delay=2, leave=False) as bar:
            for row, found in zip(rows, self.examples_of(rows, known)):
                bar.update()
                if isinstance(found, ExampleError):
                    self.errors.append(str(found))
                    continue
                example, keys = found
                answers = [answer[:MAX_LABEL] for answer in example.answers()]
                digest = text_digest(example, *keys)
                read.append((row, replace(example, images=(), chats=()), keys, digest, answers))
        examples = [example for _, example, *_ in read]
        splits = Counter(example.split for example in examples if example.split)
        counts = " and ".join(f"{split} ({n:,})" for split, n in splits.items())
        if len(splits) > 1 and "train" not in splits and any(re.fullmatch(r"[\d.]+", split) for split in splits):
            none = f"{self.path} has rows of the splits {counts}, of which none is called train"
            raise DataError(f"{none}; {APART}, or rename the column")
        self.split = "train" if "train" in splits else next(iter(splits), "") if len(splits) == 1 else ""
        if self.split == "train":
            self.errors += [str(_of_other_split(one)) for one in examples if one.split not in ("", "train")]
            read = [one for one in read if one[1].split in ("", "train")]
        elif len(splits) > 1:
            self.lines.append(f"there is no training split: reading rows of {counts}")
        usable, examples, self.keys, self.digests, self.answers = map(list, zip(*read)) if read else [[]] * 5
        self.places = frozenset().union(*(example.places.values() for example in examples))
        told = [", ".join(f"{role} from {place}" for role, place in example.places.items()) for example in examples]
        notes: dict[str, list[str]] = defaultdict(list)
        for example, places in zip(examples, told):
            for note in (f"reading {places}", *example.notes):
                notes[note].append(example.name)
        if len(set(told)) == 1:  # of all, which needs no number
            del notes[f"reading {told[0]}"]
            self.lines.insert(0, f"reading {told[0]}")
        n = len(usable)
        errors = self.errors
        if not n:
            raise DataError(f"{errors[0]}; no record of {self.path} can be used" if errors else f"{self.path} is empty")
        if len(notes.get(NO_IMAGE, ())) == n:
            seen = f"reading {told[0]}; {'; '.join(notes)}"
            raise DataError(f"no images found: no record of {self.path} names one, {seen}; --image-column names it")
        if errors and not skip_errors:
            raise DataError(
                f"{len(errors)} of {count(len(rows), 'record')} of {self.path} cannot be used, the first: {errors[0]}; "
                "--on-error skip goes on without them, --check-data lists all"
            )
        n_images = len({key for keys in self.keys for key in keys})
        where = f" in {self.folder}" if self.folder not in ("", self.path) else ""
        first = f"{STREAMED}; its first rows: " if isinstance(self, StreamedSource) else ""
        self.lines.insert(0, f"{first}{count(n, 'example')}, {count(n_images, 'different image')}{where}")
        opened = set(map(os.path.realpath, known))
        for file in self.listed:
            if os.path.realpath(file) not in opened:
                notes[f"not read: {os.path.splitext(file)[1].lower() or 'other'} files"].append(file)
        notes |= {"left out": errors} if errors else {}
        self.lines += [f"{note} ({len(names):,}, the first {names[0]})" for note, names in notes.items()]
        return usable


@dataclass(eq=False)
class StreamedSource(Source):
    """Examples in sequence, for data that are too large or too remote for random access.

    Each of n_parts readers takes whole shards if n_parts divides their number, else every n_parts-th row. An epoch has
    its own order of shards; rows are shuffled in windows.
    """

    endless: bool = True
    limit: str = ""  # examples whose keys are below it are held out

    def read(
        self, seed: str, part: int = 0, n_parts: int = 1, state: dict[str, Any] | None = None
    ) -> Iterator[tuple[Example | ExampleError, dict[str, Any]]]:
        """Yield a part's training examples, or errors, endlessly, each with the state to go on from behind it."""
        at = {"epoch": 0, "shard": 0, "window": 0, "taken": 0, "rows": None} | (state or {})
        n_shards = self.rows.num_shards
        by_shard = n_shards % n_parts == 0
        is_empty = state is None
        for epoch in count_from(at["epoch"]):
            order = list(range(part, n_shards, n_parts) if by_shard else range(n_shards))
            Random(f"{seed} {epoch}").shuffle(order)
            for turn in range(at["shard"], len(order)):
                for window, start, rows in self._windows(order[turn], at["window"], at["rows"]):
                    Random(f"{seed} {epoch} {order[turn]} {window}").shuffle(rows)
                    here = {"epoch": epoch, "shard": turn, "window": window, "rows": start}
                    mine = [i for i in range(at["taken"], len(rows)) if by_shard or i % n_parts == part]
                    for i, found in zip(mine, self.examples_of((rows[i] for i in mine), {})):
                        if not self.is_held_out(found):
                            is_empty = False
                            yield found if isinstance(found, ExampleError) else found[0], here | {"taken": i + 1}
                    at["taken"] = 0
                at |= {"window": 0, "rows": None}
            at["shard"] = 0
            if is_empty:
                raise DataError(f"{self.path} has no example to learn from in part {part + 1} of {n_parts}")

    def is_held_out(self, found: Found) -> bool:
        """True for a held-out example; an unusable row counts as trained on, where it is reported."""
        return not isinstance(found, ExampleError) and rank_of(found[1]) < self.limit

    def usable(self, errors: list[str] | None = None, held_out: bool = False) -> Iterator[Example]:
        """Yield the examples that are trained on or held out, unshuffled."""
        for found in self.examples_of(self.all_rows(), {}):
            if not isinstance(found, ExampleError):
                if self.is_held_out(found) == held_out:
                    yield found[0]
            elif errors is None:
                raise found
            else:
                errors.append(str(found))

    def all_rows(self) -> Iterator[Any]:
        """Yield the rows of all shards, unshuffled."""
        for shard in range(self.rows.num_shards):
            for _, _, rows in self._windows(shard, 0, None):
                yield from rows

    def _windows(self, shard: int, window: int, state: Any) -> Iterator[tuple[int, Any, list[Any]]]:
        """Yield a shard's windows from one on: number, state of `datasets` before it, rows (Arrow table, name)."""
        try:
            data = self.rows.shard(self.rows.num_shards, shard)
            if state is not None:
                data.load_state_dict(state)
            tables = data.iter(batch_size=1)  # iter(data) would divide shards among DataLoader workers
            for number in count_from(window):
                start = data.state_dict()
                found = list(islice(tables, SHUFFLE_WINDOW))
                if not found:
                    return
                place = f"{shard}:" if self.rows.num_shards > 1 else ""
                names = (f"{self.path}[{place}{i}]" for i in count_from(number * SHUFFLE_WINDOW))
                yield number, start, list(zip(found, names))
        except NanoVLMError:
            raise
        except Exception as error:  # of many kinds, from DNS to a broken file
            raise TrainingError(
                f"the stream of {self.path} broke off ({first_line(error)}); rerun the same command to resume from the "
                "last checkpoint"
            ) from None
