"""The order of examples: a pure function of the seed and the position, so that training can resume anywhere."""

import logging
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from random import Random
from typing import Any

import torch
from torch import Tensor

from nanovlm.console import count
from nanovlm.data.examples import EncodedExample, Example, ExampleError, collate, encode, pack
from nanovlm.data.records import OPTIONS, PROMPT_FLAG, TEXT_FILE
from nanovlm.data.rows import open_source
from nanovlm.data.source import DESCRIBED, Keys, Source, StreamedSource, limit_of, rank_of
from nanovlm.errors import DataError, UsageError
from nanovlm.options import ReadOptions, parse_data
from nanovlm.processing.image_loading import augment
from nanovlm.processing.processor import Processor

MIN_TO_HOLD_OUT = 100  # of fewer examples none are held out by default
MAX_HELD_OUT = 200  # by default, of a tenth of all examples, and of a stream
MAX_LABELS = 40  # different answers that count as classes
MAX_CONSECUTIVE_ERRORS = 100  # more bad examples in a row than this are not skipped but raise

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------- what the flags name


def open_data(
    data: Sequence[str | os.PathLike[str]], read: ReadOptions, validation: float | str | None, *, check: bool = False
) -> tuple[list[Source], list[Source]]:
    """Open all data; return training and held-out examples by source, see `split`. `source_lines` says what was read.

    validation may also be the path of a set of its own. With check, rows that cannot be used are listed in their
    source's errors and do not raise.
    """
    read = replace(read, on_error="skip") if check else read
    own_path, number = parse_validation(validation)
    shared = replace(read, is_shared=len(data) + bool(own_path) > 1)
    sources = [replace(open_source(path, shared), weight=weight) for path, weight in map(parse_data, data)]
    own = [open_source(own_path, replace(shared, stream=False))] if own_path else []
    _check_options(read, [*sources, *own])
    train, held_out = split(sources, 0 if own_path else number, read.skip_errors)
    for source in own:
        compare(source, sources)
    return train, own or held_out


def compare(own: Source, sources: Sequence[Source]) -> None:
    """Add a line to own: how many of its images are also in the sources, of a stream in its first rows."""
    trained = {key for source in sources for keys in source.keys for key in keys}
    for stream in (source for source in sources if isinstance(source, StreamedSource)):
        own.lines.append(f"compared with the first {DESCRIBED} rows of {stream.path}, not with later ones")
    if both := trained & {key for keys in own.keys for key in keys}:
        own.lines.append(f"{len(both)} of its images are also trained on")


def source_lines(train: Sequence[Source], held_out: Sequence[Source]) -> list[str]:
    """Lines that say of each source what was read of it and what was left out."""
    return list(dict.fromkeys(f"{source.path}: {line}" for source in [*train, *held_out] for line in source.lines))


def parse_validation(validation: float | str | os.PathLike[str] | None) -> tuple[str | None, float | None]:
    """Return a path or a number. A text that is both is the number; write ./ before the path."""
    if validation is None:
        return None, None
    try:
        number = float(validation)  # type: ignore[arg-type]  # a path raises
    except (TypeError, ValueError):
        return os.fspath(validation), None  # type: ignore[arg-type]
    if not 0 <= number < math.inf or (number > 1 and number % 1):
        raise UsageError(f"--validation {validation} must be a whole number, a share below 1 or a path")
    return None, number


def _check_options(read: ReadOptions, sources: Sequence[Source]) -> None:
    """UsageError for an option that has no effect on any of the sources."""
    unused = {
        "--images": read.images and all(source.folder != read.images for source in sources),
        "--stream": read.stream and not any(isinstance(source, StreamedSource) for source in sources),
        "--prompt": read.prompt is not None and not any(PROMPT_FLAG in source.places for source in sources),
        "--extension": read.extension is not None and not any(TEXT_FILE in source.places for source in sources),
    }
    paths = ", ".join(source.path for source in sources)
    if flags := [flag for flag, is_unused in unused.items() if is_unused]:
        raise UsageError(f"{flags[0]} has no effect on {paths}; omit it")
    columns = sorted({column for source in sources for column in source.columns})
    for name in OPTIONS.values():
        if getattr(read, name) not in (None, *columns):
            flag = f"--{name.replace('_', '-')}"
            listed = ", ".join(columns) or "none"
            raise UsageError(f"{flag}: {paths}: no column {getattr(read, name)!r}, only {listed}; name one of these")


# -------------------------------------------------------------------------------------------------- holding out


def split(
    sources: Sequence[Source], validation: float | None, skip_errors: bool = False
) -> tuple[list[Source], list[Source]]:
    """Split sources into training and held-out examples; validation is a number, or below 1 a share.

    The hashes of the images' bytes decide: an image is on one side, and stays there when others come or go. Nothing is
    held out of endless sources; of a stream's held-out examples the first are asked.
    """
    finite = [source for source in sources if not source.endless]
    is_streamed = any(isinstance(source, StreamedSource) for source in sources)
    n = sum(len(source.keys) for source in finite)
    is_default = validation is None
    if validation is None:
        validation = 0 if n < MIN_TO_HOLD_OUT or is_streamed else min(n // 10, MAX_HELD_OUT)
    elif validation >= 1 and is_streamed:
        raise DataError(f"--validation {validation:g} counts examples, but a stream has no size; name a fraction")
    elif validation >= max(n, 1):
        raise DataError(f"--validation {validation:g} of {n} examples leaves none to learn from; lower it")
    chosen = _choose(finite, validation, is_default)
    train: list[Source] = []
    held_out: list[Source] = []
    for source in sources:
        if isinstance(source, StreamedSource):
            held_out += [_asked(source, validation, skip_errors)] if validation else []
            train.append(source)
            continue
        held = [i for i, keys in enumerate(source.keys) if keys[0] in chosen]
        kept = source.part(sorted(set(range(len(source))).difference(held)), source.weight) if held else source
        if not len(kept):
            raise DataError(f"holding out leaves no example of {source.path} to learn from; lower --validation")
        train.append(kept)
        held_out += [source.part(held)] if held else []
    held_out = [source for source in held_out if len(source)]
    if validation and not is_default and not held_out:
        raise DataError(f"--validation {validation:g} holds nothing out of so few examples or images; raise it")
    return train, held_out


def _asked(stream: StreamedSource, share: float, skip_errors: bool) -> Source:
    """Hold a share of a stream out; return the first such examples. ExampleError for an unusable row before them."""
    stream.limit = limit_of(share)
    stream.lines.append(
        f"{share:.3g} of its rows are held out; rows that share only some of their images may be on both sides"
    )
    asked = Source(stream.path, [], replace)
    asked.rows = list(islice(stream.usable(asked.errors if skip_errors else None, held_out=True), MAX_HELD_OUT))
    return asked


def _choose(sources: Sequence[Source], validation: float, is_default: bool) -> set[str]:
    """Keys of the images to hold out: a share of all, or the number of examples with the lowest ranks.

    Examples that share images form a group. Where answers are labels, each label that has two groups gets one on
    either side, unless validation is a number below that of the labels.
    """
    examples = [keys for source in sources for keys in source.keys]
    members = _groups(examples)
    sizes = Counter(members[keys[0]][0] for keys in examples)
    ranks = {group: rank_of(members[group]) for group, n in sizes.items() if 2 * n <= len(examples)}
    order = sorted(ranks, key=ranks.__getitem__)
    labels: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for keys, answers in zip(source.keys, source.answers):
            for answer in answers:
                labels[answer].add(members[keys[0]][0])
    if not are_labels(len(labels), len(examples)):
        labels.clear()
    learned = {max(groups, key=lambda group: ranks.get(group, "")) for groups in labels.values()}
    order = [group for group in order if group not in learned]
    asked = {min(found, key=ranks.__getitem__) for groups in labels.values() if (found := groups.intersection(order))}
    if not validation or (1 <= validation < len(asked) and not is_default):
        asked.clear()
    chosen: set[str] = set()
    n_chosen = 0
    for group in sorted(order, key=lambda group: group not in asked):
        is_below = ranks[group] < limit_of(validation) if validation < 1 else n_chosen < validation
        if group in asked or is_below or (validation and not chosen):
            chosen.add(group)
            n_chosen += sizes[group]
    if validation and (left := [label for label, groups in labels.items() if not groups & chosen]):
        sources[0].lines.append(f"nothing is held out of {count(len(left), 'answer')}, the first {left[0]!r}")
    return {key for group in chosen for key in members[group]}


def are_labels(n_answers: int, n_examples: int) -> bool:
    """True if so few different answers of examples count as classes."""
    return n_answers <= MAX_LABELS and 2 * n_answers <= n_examples


def _groups(examples: Sequence[Keys]) -> dict[str, list[str]]:
    """For each key, the list of all keys that examples join with it; one list for a group, named by its first key."""
    members: dict[str, list[str]] = {}
    for keys in examples:
        found = {id(group): group for group in (members.setdefault(key, [key]) for key in keys)}
        largest, *others = sorted(found.values(), key=len, reverse=True)
        for group in others:
            largest += group
            members |= dict.fromkeys(group, largest)
    return members


# ------------------------------------------------------------------------------------------- order and batches


class Mixture:
    """An endless sequence of examples in which each source has its share.

    Sources without a weight are one group, shuffled together; its share is 1 minus the sum of the weights. If all have
    a weight, only proportions count. Every group shows all its examples before it repeats one.
    """

    def __init__(self, sources: Sequence[Source], seed: int):
        self.seed = seed
        unweighted = [source for source in sources if source.weight is None]
        weights = [source.weight for source in sources if source.weight is not None]
        self.groups = [[source] for source in sources if source.weight is not None]
        endless = [source.path for source in unweighted if source.endless]
        if endless and len(sources) > 1:
            raise DataError(f"{endless[0]} has no size to derive its share from; give it one, as in {endless[0]}@0.3")
        if unweighted:
            if sum(weights) >= 1:
                raise DataError(
                    f"shares of {' + '.join(f'{w:g}' for w in weights)} leave nothing for {unweighted[0].path}, "
                    "which has none; lower them, or give each source a share"
                )
            self.groups.append(unweighted)
            weights.append(1 - sum(weights))
        self.shares = [weight / sum(weights) for weight in weights]

    def locate(self, position: int) -> tuple[int, int]:
        """Return the group whose turn a position is, and how many examples it has shown; see Bresenham 1965."""
        left = 1.0
        for group, share in enumerate(self.shares[:-1]):
            shown = math.floor(position * share / left)
            if math.floor((position + 1) * share / left) > shown:
                return group, shown
            position -= shown
            left -= share
        return len(self.groups) - 1, position

    def pick(self, group: int, turn: int) -> tuple[Source, int]:
        """The source of a group's turn-th example, counted over all epochs, and its index; not for streams."""
        sources = self.groups[group]
        size = sum(map(len, sources))
        epoch, k = divmod(turn, size)
        i = int(_permutation(size, f"{self.seed} {group} {epoch}")[k])
        for source in sources:
            if i < len(source):
                return source, i
            i -= len(source)
        raise AssertionError("a permutation holds indices below its size")


@lru_cache(maxsize=16)
def _permutation(n: int, seed: str) -> Tensor:
    generator = torch.Generator().manual_seed(Random(seed).getrandbits(63))
    return torch.randperm(n, generator=generator)


@dataclass
class ExampleBatches:
    """A function step -> batch, see `collate`, which can be pickled.

    The function is pure, unless a source is a stream. Streams are divided into n_parts parts, and batch n reads on in
    part n % n_parts: a process that makes every n_parts-th batch reads one part. The batch then holds the position in
    each stream under "streams"; `states` holds the positions to start from.
    """

    mixture: Mixture
    processor: Processor
    batch_size: int
    skip_errors: bool = False  # show the group's next example instead of a bad one
    pack: int = 0  # join examples into rows of at most this many tokens; 0 gives each a row
    augment: float = 0.0  # how much `augment` changes images that are shown again
    n_parts: int = 1
    positions: Sequence[int] | None = None  # of a sequence that ends; its last batch may be smaller
    states: dict[str, Any] = field(default_factory=dict)  # of streams, by group and part
    reported: set[str] = field(default_factory=set)  # messages of skipped examples, which come again every epoch
    _readers: dict[str, Iterator[tuple[Example | ExampleError, Any]]] = field(default_factory=dict, init=False)

    def __getstate__(self) -> dict[str, Any]:
        # an open iterator cannot be pickled: another process starts from states
        return self.__dict__ | {"_readers": {}}

    def __call__(self, step: int) -> dict[str, Any]:
        numbers = range(step * self.batch_size, (step + 1) * self.batch_size)
        positions = numbers if self.positions is None else self.positions[numbers.start : numbers.stop]
        rows = [self.row(position) for position in positions]
        limit = self.processor.cfg.lm_max_position_embeddings
        batch: dict[str, Any] = collate(pack(rows, min(self.pack, limit)) if self.pack else rows, max_length=limit)
        return batch | ({"streams": dict(self.states)} if self._readers else {})

    def row(self, position: int) -> EncodedExample:
        """The encoded example at a position; ExampleError if it is bad and skip_errors is off."""
        rng = Random(f"{self.mixture.seed} {position}")
        step, b = divmod(position, self.batch_size)
        group, turn = self.mixture.locate(step // self.n_parts * self.batch_size + b)
        for skip in range(MAX_CONSECUTIVE_ERRORS):
            try:
                example, shown_before = self._example(group, turn + skip, step % self.n_parts)
                change = partial(augment, amount=self.augment, rng=rng) if self.augment and shown_before else None
                return encode(example, self.processor, change)
            except ExampleError as error:
                if not self.skip_errors:
                    raise
                if str(error) not in self.reported:
                    self.reported.add(str(error))
                    logger.warning("skipped: %s", error)
        raise DataError(f"{MAX_CONSECUTIVE_ERRORS} examples in a row cannot be used; see the reasons with --check-data")

    def _example(self, group: int, turn: int, part: int) -> tuple[Example, bool]:
        """A part's turn-th example of a group, and whether the group has shown it before."""
        stream = self.mixture.groups[group][0]
        if isinstance(stream, StreamedSource):
            key = f"{group}:{part}"
            if key not in self._readers:
                seed = f"{self.mixture.seed} {group}"
                self._readers[key] = stream.read(seed, part, self.n_parts, self.states.get(key))
            example, self.states[key] = next(self._readers[key])
            if isinstance(example, ExampleError):
                raise example
            return example, False
        turn = turn * self.n_parts + part
        source, i = self.mixture.pick(group, turn)
        return source[i], turn >= sum(map(len, self.mixture.groups[group]))
