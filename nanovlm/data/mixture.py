"""Which example stands where: a pure function of the seed and the place, so that a training goes on anywhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from random import Random

import torch
from torch import Tensor

from nanovlm.console import print_error
from nanovlm.data.examples import EncodedExample, Example, ExampleError, collate, encode_checked
from nanovlm.data.packing import pack
from nanovlm.data.source import Source, Stream
from nanovlm.errors import DataError
from nanovlm.image_processing import random_crop
from nanovlm.processor import Processor

BLOCK = 1000  # places over which shares are kept exactly
TRIES = 100  # bad examples in a row after which skipping them is hiding something


def digest(key: str) -> float:
    """A number in [0, 1) that is a key's for ever."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=6).digest()) / 2**48


@dataclass(frozen=True)
class Subset:
    """Some examples of a source by their numbers, or all that a stream has; and the share that was named for them."""

    source: Source | Stream
    numbers: Sequence[int]
    weight: float | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[tuple[str, object]]:
        """Name and record of each example; `source.example` makes it of them."""
        if isinstance(self.source, Stream):
            yield from ((self.source.name(number), row) for number, row in self.source.numbered())
        else:
            yield from ((self.source.name(number), self.source.records[number]) for number in self.numbers)


def split(sources: Sequence[tuple[Source | Stream, float | None]], validation: float) -> tuple[list[Subset], list[Subset]]:
    """What is learned from and what is held out: a share (below 1) or a number of all examples.

    The hash of an example's key decides, so that an example stays on its side when others come or go, and examples
    of one picture stay together, even if that holds out a few more than asked.
    """
    hashes = {}
    for i, (source, _) in enumerate(sources):
        if validation and not source.endless:
            hashes[i] = [digest(source.key(n)) for n in range(len(source))]
    below = validation
    if validation >= 1:
        if any(isinstance(source, Stream) for source, _ in sources):
            raise DataError(f"--validation {validation:g} would count examples, and a stream's are not; name a share")
        ranked = sorted(value for values in hashes.values() for value in values)
        if validation >= len(ranked):
            raise DataError(f"--validation {validation:g} of {len(ranked)} examples leaves none to learn from")
        last = ranked[int(validation) - 1]
        below = min((value for value in ranked if value > last), default=1.0)
    learned, held = [], []
    for i, (source, weight) in enumerate(sources):
        if isinstance(source, Stream):
            learned.append(Subset(source.only(_Side(below, False)) if validation else source, (), weight))
            if validation:
                held.append(Subset(source.only(_Side(below, True)), (), weight))
            continue
        values = hashes.get(i)
        inside = range(len(source)) if values is None else [n for n, value in enumerate(values) if value >= below]
        if not len(inside):
            raise DataError(f"--validation {validation:g} leaves no example of {source.path} to learn from")
        learned.append(Subset(source, inside, weight))
        if outside := [n for n, value in enumerate(values or ()) if value < below]:
            held.append(Subset(source, outside, weight))
    if validation and not held:
        raise DataError(f"--validation {validation:g} holds nothing out of so few examples; raise it")
    return learned, held


@dataclass(frozen=True)
class _Side:
    below: float
    held: bool

    def __call__(self, key: str) -> bool:
        return (digest(key) < self.below) == self.held


class Mixture:
    """An endless sequence of examples, in which each part has its share.

    Parts without a weight are shuffled together and divide what the weights leave of 1; with a weight each, only the
    weights' proportions count. Every group shows all it has before it shows anything again.
    """

    def __init__(self, parts: Sequence[Subset], seed: int):
        self.seed = seed
        free = [part for part in parts if part.weight is None]
        weights = [part.weight for part in parts if part.weight is not None]
        self.groups = [[part] for part in parts if part.weight is not None]
        endless = [part.source.path for part in free if part.source.endless]
        if endless and len(parts) > 1:
            raise DataError(f"{endless[0]} has no size to tell its share by; give it one, as in {endless[0]}@0.3")
        if free:
            if sum(weights) >= 1:
                raise DataError(
                    f"shares of {' + '.join(f'{w:g}' for w in weights)} leave nothing for {free[0].source.path}, which "
                    "has none; lower them, or give each a share"
                )
            self.groups.append(free)
            weights.append(1 - sum(weights))
        self.shares = [weight / sum(weights) for weight in weights]
        self.counts = _apportion(self.shares)
        if 0 in self.counts:
            path = self.groups[self.counts.index(0)][0].source.path
            raise DataError(f"the share of {path} is less than one example in {BLOCK}; raise it, or leave it out")

    def locate(self, place: int) -> tuple[int, int]:
        """Whose turn it is at a place: a group, and how many turns that group had before."""
        if len(self.groups) == 1:
            return 0, place
        block, inside = divmod(place, BLOCK)
        order = _turns(tuple(self.counts), f"{self.seed} {block}")
        group = order[inside]
        return group, block * self.counts[group] + order[:inside].count(group)

    def pick(self, group: int, turn: int) -> tuple[Source | Stream, int]:
        """The source and the number in it of a group's example, its turns counted over all epochs; for a stream,
        the turn."""
        parts = self.groups[group]
        if isinstance(parts[0].source, Stream):
            return parts[0].source, turn
        epoch, k = divmod(turn, sum(map(len, parts)))
        i = int(_permutation(sum(map(len, parts)), f"{self.seed} {group} {epoch}")[k])
        for part in parts:
            if i < len(part):
                return part.source, part.numbers[i]
            i -= len(part)
        raise AssertionError

    def epoch(self, place: int, later: int = 0) -> int:
        """How often the example at a place, or later, was shown before."""
        group, turn = self.locate(place)
        stream = isinstance(self.groups[group][0].source, Stream)
        return 0 if stream else (turn + later) // sum(map(len, self.groups[group]))

    def example(self, place: int, later: int = 0) -> Example:
        """The example at a place, or the one so many turns of its group later."""
        group, turn = self.locate(place)
        source, number = self.pick(group, turn + later)
        return source.at(number, f"{self.seed} {group}") if isinstance(source, Stream) else source[number]


def _apportion(shares: Sequence[float]) -> list[int]:
    """BLOCK divided by shares, the remainder going to the largest fractions (Hamilton's method)."""
    counts = [int(share * BLOCK) for share in shares]
    fractions = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * BLOCK)
    for i in fractions[: BLOCK - sum(counts)]:
        counts[i] += 1
    return counts


@lru_cache(maxsize=4)
def _turns(counts: tuple[int, ...], seed: str) -> list[int]:
    order = [group for group, count in enumerate(counts) for _ in range(count)]
    Random(seed).shuffle(order)
    return order


@lru_cache(maxsize=16)
def _permutation(n: int, seed: str) -> Tensor:
    generator = torch.Generator().manual_seed(Random(seed).getrandbits(63))
    return torch.randperm(n, generator=generator)


@dataclass(frozen=True)
class Batches:
    """step -> a batch, a pure function that can be sent to another process."""

    mixture: Mixture
    processor: Processor
    batch_size: int
    skip: bool = False  # show the group's next example in the place of a bad one
    pack: int = 0  # join examples into rows of so many tokens; 0 keeps a row for each
    augment: float = 0.0  # what is shown again is cropped at random, by up to this part of it on each side
    skipped: set[str] = field(default_factory=set)  # what was said of bad examples, each of which comes again

    def __call__(self, step: int) -> dict:
        rows = [self.row(step * self.batch_size + b) for b in range(self.batch_size)]
        limit = self.processor.cfg.lm_max_position_embeddings
        return collate(pack(rows, min(self.pack, limit)) if self.pack else rows, limit=limit)

    def row(self, place: int) -> EncodedExample:
        rng = Random(f"{self.mixture.seed} {place}")
        for later in range(TRIES):
            again = self.augment and self.mixture.epoch(place, later)
            view = partial(random_crop, max_margin=self.augment, rng=rng) if again else None
            try:
                return encode_checked(self.mixture.example(place, later), self.processor, view)
            except ExampleError as error:
                if not self.skip:
                    raise
                if str(error) not in self.skipped:
                    self.skipped.add(str(error))
                    print_error(f"skipped: {error}")
        raise DataError(f"{TRIES} examples in a row cannot be used; see what is wrong by --check-data")
