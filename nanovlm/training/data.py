"""The data of a fine-tuning run: their names and digests, and how often each example is shown."""

import os
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import torch

from models.vision_language_model import VisionLanguageModel
from nanovlm.console import count
from nanovlm.data import Mixture, Source, StreamedSource
from nanovlm.data.mixture import source_lines
from nanovlm.options import parse_data
from nanovlm.training.checkpointing import stored_settings
from nanovlm.training.config import FinetuneOptions, TrainConfig
from nanovlm.training.distributed import world_size

DIGESTED = 256  # weights at either end of a tensor


def resumed_options(options: FinetuneOptions) -> FinetuneOptions:
    """Return the options, with the validation of the run that they resume unless they name one."""
    settings = stored_settings(options.out) if options.validation is None else None
    return options if settings is None else replace(options, validation=settings["validation"])


def absolute(data: str | os.PathLike[str]) -> str:
    """Name of data, with its share if any, as an absolute path, or as it is if it is no path."""
    path, _ = parse_data(data)
    return os.path.abspath(path) + os.fspath(data)[len(path) :] if os.path.exists(path) else os.fspath(data)


def fingerprint(training: Sequence[Source], n_parts: int = 1) -> str:
    """Text that changes with the data: names, shares, numbers and digests of examples; for a stream its parts."""
    names = []
    for source in training:
        share = "" if source.weight is None else f"@{source.weight:g}"
        if not source.endless:
            digest = blake2b("".join(source.digests).encode(), digest_size=4).hexdigest()
            names.append(f"{os.path.basename(absolute(source.path))}{share} ({len(source)}, {digest})")
        else:
            names.append(absolute(source.path) + share + (f" (in {n_parts} parts)" if n_parts > 1 else ""))
    return "; ".join(names)


def digest(model: VisionLanguageModel) -> str:
    """A digest of the ends of all weights, by which a model is known under another name."""
    ends = blake2b(digest_size=4)
    for parameter in model.parameters():
        flat = parameter.detach().flatten()
        ends.update(torch.cat((flat[:DIGESTED], flat[-DIGESTED:])).float().cpu().numpy().tobytes())
    return ends.hexdigest()


def examples_per_step(cfg: TrainConfig) -> int:
    """The number of examples of an optimizer step, over all processes."""
    return cfg.batch_size * cfg.gradient_accumulation_steps * world_size()


def count_steps_per_epoch(mixture: Mixture, cfg: TrainConfig) -> float:
    """Optimizer steps until every example was shown once, without endless sources; 0 if there are no others."""
    sizes = [0 if group[0].endless else sum(map(len, group)) for group in mixture.groups]
    return max(size / share for size, share in zip(sizes, mixture.shares)) / examples_per_step(cfg)


def describe_data(mixture: Mixture, held_out: Sequence[Source], cfg: TrainConfig, is_default: bool) -> str:
    """Lines that say what was read, how often each example is shown, and how many are held out."""
    n_shown = cfg.max_steps * examples_per_step(cfg)
    n_held_out = sum(map(len, held_out))
    training = [source for group in mixture.groups for source in group]
    parts = []
    for sources, share in zip(mixture.groups, mixture.shares):
        paths = ", ".join(source.path for source in sources)
        if sources[0].endless:
            parts.append(f"{paths}: {share * n_shown:,.0f} examples are shown")
        else:
            total = sum(map(len, sources))
            parts.append(f"{paths}: {count(total, 'example')}, each shown {share * n_shown / total:.1f} times")
    if n_held_out:
        parts.append(f"{n_held_out:,} held out" + (" (--validation N holds out N, 0 none)" if is_default else ""))
    elif is_default and any(isinstance(one, StreamedSource) or not one.endless for one in training):
        parts.append("nothing held out (--validation 0.05 holds out 5%)")
    return "\n".join([*source_lines(training, held_out), "; ".join(parts)])
