"""The examples of a fine-tuning run: which are trained on, which are held out, and how often each is shown."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b

from nanovlm.console import count
from nanovlm.data import ExampleError, Mixture, Source, Stream, Subset, open_data
from nanovlm.data.mixture import parse_data as parse_data
from nanovlm.data.mixture import source_lines
from nanovlm.errors import TrainingError
from nanovlm.training.checkpointing import stored_settings
from nanovlm.training.config import FinetuneOptions, TrainConfig


def resumed_options(options: FinetuneOptions) -> FinetuneOptions:
    """The options; if they do not say what to hold out, with the validation of the run that they resume."""
    settings = stored_settings(options.out) if options.validation is None else None
    return options if settings is None else replace(options, validation=settings["validation"])


def open_examples(options: FinetuneOptions, *, check: bool = False) -> tuple[list[Subset], list[Subset]]:
    """The training examples and the held-out examples of each source, see `open_data`."""
    return open_data(options.data, options.read, options.validation, check=check)


def world_size() -> int:
    """The number of training processes."""
    return int(os.environ.get("WORLD_SIZE", 1))


def fingerprint(training: Sequence[Subset], n_parts: int = 1) -> str:
    """Identify the examples by each source's name, share, number of examples and a digest of their texts and images.

    The order of a stream depends on the number of parts in which it is read, so that one belongs to it.
    """
    parts = []
    for subset in training:
        source, share = subset.source, "" if subset.weight is None else f"@{subset.weight:g}"
        path = os.path.abspath(source.path) if os.path.exists(source.path) else source.path
        part = path + share
        if isinstance(source, Source) and not source.endless:
            digest = blake2b("".join(source.digests[i] for i in subset.indices).encode(), digest_size=4)
            part = f"{os.path.basename(path)}{share} ({len(subset)}, {digest.hexdigest()})"
        if isinstance(source, Stream) and n_parts > 1:
            part += f" (in {n_parts} parts)"
        parts.append(part)
    return "; ".join(parts)


def count_steps_per_epoch(mixture: Mixture, cfg: TrainConfig) -> float:
    """Optimizer steps after which every example has been shown once; sources without an end do not count, 0 if all."""
    sizes = [0 if group[0].source.endless else sum(map(len, group)) for group in mixture.groups]
    positions = max(size / share for size, share in zip(sizes, mixture.shares))
    return positions / (cfg.batch_size * cfg.gradient_accumulation_steps * world_size())


def describe_data(
    mixture: Mixture, held_out: Sequence[Subset], cfg: TrainConfig, validation: str | float | None
) -> str:
    """Lines that say what was read, and one how often each example is shown, and how many are held out."""
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
    training = [subset for group in mixture.groups for subset in group]
    return "\n".join([*source_lines(training, held_out), "; ".join(parts)])


@contextmanager
def data_errors() -> Iterator[None]:
    """Turn an example that cannot be used into a TrainingError that says how to go on without it."""
    try:
        yield
    except ExampleError as error:
        raise TrainingError(
            f"{error}; --on-error skip goes on without it, --check-data lists all unusable examples"
        ) from error
