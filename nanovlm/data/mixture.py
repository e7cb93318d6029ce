"""The order of examples: a pure function of the seed and the position, so that training can resume anywhere."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import chain
from random import Random

import torch
from torch import Tensor

from nanovlm.data.examples import EncodedExample, Example, ExampleError, collate, encode_checked
from nanovlm.data.packing import pack
from nanovlm.data.source import WHOLE, Part, Source, Stream
from nanovlm.errors import DataError
from nanovlm.processing.image_loading import augment
from nanovlm.processing.processor import Processor

SHARE_BLOCK = 1000  # positions within which each share is kept exactly
MIN_TO_HOLD_OUT = 100  # of fewer examples none are held out by default
MIN_HELD_OUT, MAX_HELD_OUT = 10, 200  # by default, a twentieth of all examples within these limits
MAX_CONSECUTIVE_ERRORS = 100  # more bad examples in a row than this are not skipped but raise

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subset:
    """Some examples of a source by index, or all of a stream; weight is the share that the user gave the source."""

    source: Source | Stream
    indices: Sequence[int]
    weight: float | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[str, object]]:
        """Name and record of each example, from which `source.make_example` makes it."""
        if isinstance(self.source, Stream):
            for key, row in self.source.keyed_rows():
                yield self.source.name(key), row
        else:
            for i in self.indices:
                yield self.source.name(i), self.source.record(i)


def split(
    sources: Sequence[tuple[Source | Stream, float | None]], validation: float | None
) -> tuple[list[Subset], list[Subset]]:
    """Split (source, weight) pairs into training and held-out subsets; validation is a fraction below 1 or a number.

    None holds out a twentieth of all examples, at least 10 and at most 200, but none of fewer than 100 or of streams.

    The hash of an example's key decides, so that an example stays on its side when others come or go, and examples of
    one image stay together, even if that holds out a few more than asked. Endless sources are not held out.
    """
    if validation is None:
        return _split_by_default(sources)
    hashes = [_key_hashes(source) if validation else [] for source, _ in sources]
    threshold = validation
    if validation >= 1:
        if any(isinstance(source, Stream) for source, _ in sources):
            raise DataError(f"--validation {validation:g} counts examples, but a stream has no size; name a fraction")
        threshold = _threshold_for(int(validation), sorted(chain(*hashes)))
    train: list[Subset] = []
    held_out: list[Subset] = []
    for (source, weight), values in zip(sources, hashes):
        if isinstance(source, Stream):
            for subsets, is_held_out in ((train, False), (held_out, True))[: 2 if threshold else 1]:
                keep = partial(_is_on_side, threshold, is_held_out)  # a stream is pickled
                subsets.append(Subset(replace(source, keep_key=keep), (), weight))
            continue
        held = [i for i, value in enumerate(values) if value < threshold]
        kept = [i for i, value in enumerate(values) if value >= threshold] if held else range(len(source))
        if not len(kept):
            raise DataError(f"--validation {validation:g} leaves no example of {source.path} to learn from; lower it")
        train.append(Subset(source, kept, weight))
        held_out += [Subset(source, held, weight)] if held else []
    if validation and not held_out:
        raise DataError(f"--validation {validation:g} holds nothing out of so few examples; raise it")
    return train, held_out


def _split_by_default(sources: Sequence[tuple[Source | Stream, float | None]]) -> tuple[list[Subset], list[Subset]]:
    n = sum(len(source) for source, _ in sources if isinstance(source, Source) and not source.endless)
    if n >= MIN_TO_HOLD_OUT and not any(isinstance(source, Stream) for source, _ in sources):
        wanted = min(max(n // 20, MIN_HELD_OUT), MAX_HELD_OUT)
        with suppress(DataError):  # nothing is left of a source with few examples
            train, held_out = split(sources, wanted)
            if sum(map(len, held_out)) <= 2 * wanted:  # the examples of one image may be many
                return train, held_out
    return split(sources, 0)


def hash_fraction(key: str) -> float:
    """A number in [0, 1) that depends on the key alone."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=6).digest()) / 2**48


def _key_hashes(source: Source | Stream) -> list[float]:
    """Of each example that may be held out."""
    if isinstance(source, Stream) or source.endless:
        return []
    return [hash_fraction(source.key(i)) for i in range(len(source))]


def _threshold_for(n: int, ranked: Sequence[float]) -> float:
    """The threshold below which n of the hashes lie, or a few more that equal the n-th."""
    if n >= len(ranked):
        raise DataError(f"--validation {n} of {len(ranked)} examples leaves none to learn from; lower it")
    return min((value for value in ranked if value > ranked[n - 1]), default=1.0)


def _is_on_side(threshold: float, held_out: bool, key: str) -> bool:
    return (hash_fraction(key) < threshold) == held_out


class Mixture:
    """An endless sequence of examples in which each subset has its share.

    Subsets without a weight form one group, shuffled together, which gets what the weights leave of 1; if all have a
    weight, only the proportions count. Every group shows all its examples before it repeats one. The sequence may be
    read in parts, each with positions of its own, which together show what the whole shows.
    """

    def __init__(self, subsets: Sequence[Subset], seed: int):
        self.seed = seed
        unweighted = [subset for subset in subsets if subset.weight is None]
        weights = [subset.weight for subset in subsets if subset.weight is not None]
        self.groups = [[subset] for subset in subsets if subset.weight is not None]
        endless = [subset.source.path for subset in unweighted if subset.source.endless]
        if endless and len(subsets) > 1:
            raise DataError(f"{endless[0]} has no size to derive its share from; give it one, as in {endless[0]}@0.3")
        if unweighted:
            if sum(weights) >= 1:
                raise DataError(
                    f"shares of {' + '.join(f'{w:g}' for w in weights)} leave nothing for {unweighted[0].source.path}, "
                    "which has none; lower them, or give each source a share"
                )
            self.groups.append(unweighted)
            weights.append(1 - sum(weights))
        self.shares = [weight / sum(weights) for weight in weights]
        self.counts = _apportion(self.shares)
        if 0 in self.counts:
            path = self.groups[self.counts.index(0)][0].source.path
            raise DataError(f"the share of {path} is less than one example in {SHARE_BLOCK}; raise it, or leave it out")

    def locate(self, position: int) -> tuple[int, int]:
        """The group whose example is at a position, and how many examples that group has shown before."""
        if len(self.groups) == 1:
            return 0, position
        block, offset = divmod(position, SHARE_BLOCK)
        order = _group_order(tuple(self.counts), f"{self.seed} {block}")
        group = order[offset]
        return group, block * self.counts[group] + order[:offset].count(group)

    def pick(self, group: int, turn: int) -> tuple[Source, int]:
        """The source of a group's turn-th example, counted over all epochs, and its index; not for streams."""
        subsets = self.groups[group]
        size = sum(map(len, subsets))
        epoch, k = divmod(turn, size)
        i = int(_permutation(size, f"{self.seed} {group} {epoch}")[k])
        for subset in subsets:
            if i < len(subset):
                assert isinstance(subset.source, Source)
                return subset.source, subset.indices[i]
            i -= len(subset)
        raise AssertionError("a permutation holds indices below its size")

    def epoch(self, position: int, skip: int = 0, part: Part = WHOLE) -> int:
        """The number of times that the example of a part, see `example`, has been shown before."""
        group, turn = self.locate(position)
        is_stream = isinstance(self.groups[group][0].source, Stream)
        return 0 if is_stream else part.turn_of_all(turn + skip) // sum(map(len, self.groups[group]))

    def example(self, position: int, skip: int = 0, part: Part = WHOLE) -> Example:
        """The part's example at a position, or the one of its group that comes skip examples later."""
        group, turn = self.locate(position)
        stream = self.groups[group][0].source
        if isinstance(stream, Stream):
            return stream.example_at(turn + skip, f"{self.seed} {group}", part)
        source, i = self.pick(group, part.turn_of_all(turn + skip))
        return source[i]

    def distinct(self, n: int) -> list[int]:
        """The positions below n whose example has not been shown before."""
        first: dict[object, int] = {}
        for position in range(n):
            try:
                example = self.example(position)
                first.setdefault((example.name, *example.qa_pairs), position)
            except ExampleError as error:
                first.setdefault(str(error), position)
        return list(first.values())


def _apportion(shares: Sequence[float]) -> list[int]:
    """SHARE_BLOCK divided by shares, the remainder going to the largest fractions (Hamilton's method)."""
    counts = [int(share * SHARE_BLOCK) for share in shares]
    by_fraction = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * SHARE_BLOCK)
    for i in by_fraction[: SHARE_BLOCK - sum(counts)]:
        counts[i] += 1
    return counts


@lru_cache(maxsize=4)
def _group_order(counts: tuple[int, ...], seed: str) -> list[int]:
    order = [group for group, count in enumerate(counts) for _ in range(count)]
    Random(seed).shuffle(order)
    return order


@lru_cache(maxsize=16)
def _permutation(n: int, seed: str) -> Tensor:
    generator = torch.Generator().manual_seed(Random(seed).getrandbits(63))
    return torch.randperm(n, generator=generator)


@dataclass(frozen=True)
class Batches:
    """A function step -> batch, see `collate`; it is pure and can be pickled.

    With n_parts, batch n is of part n % n_parts of the mixture: a process that makes every n_parts-th batch reads one
    part of a stream.
    """

    mixture: Mixture
    processor: Processor
    batch_size: int
    skip_errors: bool = False  # show the group's next example instead of a bad one
    pack: int = 0  # join examples into rows of at most this many tokens; 0 gives each a row
    augment: float = 0.0  # how much `augment` changes images that are shown again
    n_parts: int = 1
    positions: Sequence[int] | None = None  # of a sequence that ends; its last batch may be smaller
    reported: set[str] = field(default_factory=set)  # messages of skipped examples, which come again every epoch

    def __call__(self, step: int) -> dict[str, Tensor | None]:
        numbers = range(step * self.batch_size, (step + 1) * self.batch_size)
        positions = numbers if self.positions is None else self.positions[numbers.start : numbers.stop]
        rows = [self.row(position) for position in positions]
        limit = self.processor.cfg.lm_max_position_embeddings
        return collate(pack(rows, min(self.pack, limit)) if self.pack else rows, max_length=limit)

    def row(self, position: int) -> EncodedExample:
        """The encoded example at a position; ExampleError if it is bad and skip_errors is off."""
        rng = Random(f"{self.mixture.seed} {position}")
        step, b = divmod(position, self.batch_size)
        turn, part = step // self.n_parts * self.batch_size + b, Part(step % self.n_parts, self.n_parts)
        for skip in range(MAX_CONSECUTIVE_ERRORS):
            shown_before = self.mixture.epoch(turn, skip, part) > 0
            change = partial(augment, amount=self.augment, rng=rng) if self.augment and shown_before else None
            try:
                return encode_checked(self.mixture.example(turn, skip, part), self.processor, change)
            except ExampleError as error:
                if not self.skip_errors:
                    raise
                if str(error) not in self.reported:
                    self.reported.add(str(error))
                    logger.warning("skipped: %s", error)
        raise DataError(f"{MAX_CONSECUTIVE_ERRORS} examples in a row cannot be used; see the reasons with --check-data")
