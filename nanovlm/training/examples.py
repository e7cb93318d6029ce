"""The examples of a fine-tuning run: which are trained on, which are held out, and how often each is shown."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from hashlib import blake2b

from nanovlm.console import count
from nanovlm.data import Mixture, Source, Stream, Subset, open_source, split
from nanovlm.data.examples import ExampleError
from nanovlm.errors import MissingCaptionsError, TrainingError, UsageError
from nanovlm.options import ReadOptions
from nanovlm.synthetic.recipe import scene_source
from nanovlm.training.checkpointing import stored_settings
from nanovlm.training.config import FinetuneOptions, TrainConfig


def resumed_options(options: FinetuneOptions) -> FinetuneOptions:
    """The options; if they do not say what to hold out, with the validation of the run that they resume."""
    settings = stored_settings(options.out) if options.validation is None else None
    return options if settings is None else replace(options, validation=settings["validation"])


def open_examples(options: FinetuneOptions, *, skip_sources: bool = False) -> tuple[list[Subset], list[Subset]]:
    """The training examples and the held-out examples of each source."""
    return open_data(options.data, options.read, options.validation, skip_sources=skip_sources)


def open_data(
    data: Sequence[str | os.PathLike[str]],
    read: ReadOptions,
    validation: float | None,
    *,
    skip_sources: bool = False,
) -> tuple[list[Subset], list[Subset]]:
    """The training examples and the held-out examples of each source, see FinetuneOptions and `split`.

    With skip_sources, those whose captions are missing are left out if there are others.
    """
    sources, missing = [], []
    for text in data:
        path, share = parse_data(text)
        try:
            sources.append((open_source(path, read, generators={"scenes": scene_source}), share))
        except MissingCaptionsError as error:
            missing.append(str(error))
    if not missing:
        check_supported(read, [source for source, _ in sources])
    elif not (skip_sources and sources):
        raise MissingCaptionsError("; ".join(missing))
    return split(sources, validation)


def parse_data(name: str | os.PathLike[str]) -> tuple[str, float | None]:
    """PATH@SHARE as its two parts; a path that exists, or has a / behind its last @, is a path without a share."""
    text = os.fspath(name)
    path, separator, share = text.rpartition("@")
    if not separator or "/" in share or os.path.exists(text):
        return text, None
    try:
        weight = float(share)
    except ValueError:
        raise UsageError(
            f"--data {text}: no such file or folder, and {share!r} is no share like 0.3; correct either"
        ) from None
    if not 0 < weight < math.inf:
        raise UsageError(f"--data {text}: a share must be above 0")
    return path, weight


def check_supported(read: ReadOptions, sources: Sequence[Source | Stream]) -> None:
    """UsageError if an option was set that has no effect on any of the sources."""
    defaults = ReadOptions()
    for f in fields(ReadOptions):
        is_set = getattr(read, f.name) not in (None, getattr(defaults, f.name))
        has_effect = f.name == "on_error" or any(f.name in source.supported_options for source in sources)
        if is_set and not has_effect:
            paths = ", ".join(source.path for source in sources)
            raise UsageError(f"--{f.name.replace('_', '-')} has no effect on {paths}; omit it")


def world_size() -> int:
    """The number of training processes."""
    return int(os.environ.get("WORLD_SIZE", 1))


def fingerprint(training: Sequence[Subset], n_parts: int = 1) -> str:
    """Identify the examples by each source's path, share, number of examples and a digest of their fingerprints.

    The order of a stream depends on the number of parts in which it is read, so that one belongs to it.
    """
    parts = []
    for subset in training:
        part = subset.source.path if subset.weight is None else f"{subset.source.path}@{subset.weight:g}"
        if isinstance(subset.source, Source) and not subset.source.endless:
            digest = blake2b(digest_size=4)
            for index in subset.indices:
                digest.update(subset.source.fingerprint(index).encode("utf-8", "surrogatepass") + b"\0")
            part += f" ({len(subset)}, {digest.hexdigest()})"
        if isinstance(subset.source, Stream) and n_parts > 1:
            part += f" (in {n_parts} parts)"
        parts.append(part)
    return "; ".join(parts)


def count_steps_per_epoch(mixture: Mixture, cfg: TrainConfig) -> float:
    """Optimizer steps after which every example has been shown once; sources without an end do not count, 0 if all."""
    sizes = [0 if group[0].source.endless else sum(map(len, group)) for group in mixture.groups]
    positions = max(size / share for size, share in zip(sizes, mixture.shares))
    return positions / (cfg.batch_size * cfg.gradient_accumulation_steps * world_size())


def describe_data(mixture: Mixture, held_out: Sequence[Subset], cfg: TrainConfig, validation: float | None) -> str:
    """One line: how many examples each source has, how often each is shown, and how many are held out."""
    batches = cfg.max_steps * cfg.gradient_accumulation_steps * world_size()
    parts = []
    for subsets, share in zip(mixture.groups, mixture.shares):
        paths, shown = ", ".join(subset.source.path for subset in subsets), share * batches * cfg.batch_size
        if subsets[0].source.endless:
            parts.append(f"{paths}: {shown:,.0f} examples are shown")
        else:
            total = sum(map(len, subsets))
            parts.append(f"{paths}: {count(total, 'example')}, each shown {shown / total:.1f} times")
    if held_out:
        hint = " (--validation N holds out N, 0 none)" if validation is None else ""
        parts.append(f"{sum(map(len, held_out)):,} held out{hint}")
    elif validation is None:
        sources = [subset.source for group in mixture.groups for subset in group]
        if any(isinstance(source, Stream) for source in sources):
            parts.append("nothing held out (--validation 0.05 holds out 5%)")
        elif not all(source.endless for source in sources):
            parts.append("nothing held out (--validation N holds out N)")
    return "; ".join(parts)


@contextmanager
def data_errors() -> Iterator[None]:
    """Turn an example that cannot be used into a TrainingError that says how to go on without it."""
    try:
        yield
    except ExampleError as error:
        raise TrainingError(
            f"{error}; --on-error skip goes on without it, --check-data lists all unusable examples"
        ) from error
