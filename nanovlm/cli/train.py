"""`nanovlm train`: fine-tune a model on your own data, or train the embedded model from scratch."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from models.common import files
from nanovlm.cli.options import add_record_flags, check_data_names, flag_of, from_args, given, settings_of
from nanovlm.embedded import default_prompt
from nanovlm.errors import FileError, UsageError
from nanovlm.options import ModelOptions, ReadOptions
from nanovlm.training.config import (
    ADAPTERS,
    AUTOMATIC,
    FINETUNING,
    JOINED,
    JOINED_ADAPTERS,
    SCENES,
    FinetuneOptions,
    TrainConfig,
)  # fmt: skip

HELP = "Train a model. Rerun the same command to resume an interrupted run."
EXAMPLE = "nanovlm train --data photos --out out/mine"
NOT_WRITTEN = ("config", "debug", "prog", "run", "check_data")  # to run.json
PRESETS = {"": FINETUNING, "LoRA": ADAPTERS, "backbones": JOINED, "scenes": SCENES}  # named in the help
FOR_SCENES = ("out", "device")  # settings of FinetuneOptions that --recipe has, too
EXCLUSIVE = (("data", "recipe"), ("epochs", "max_steps"), ("backbones", "model"))
# In bfloat16 on a CPU, oneDNN compiles code for each sequence length and keeps that of 1024 calls in two caches, which
# grew by 715 MiB in 100 steps of the embedded model. With 64 calls it is 161 MiB after 5 steps and 100, and no slower.
ONEDNN_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
ONEDNN_CAPACITY = "64"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "take flags from a file, as every run writes one to --out; those of the command line win"
    add("--config", metavar="run.json", help=text)
    add("--recipe", choices=("scenes",), help="instead of --data: train the embedded model from scratch")
    text = "read all examples, print counts, errors and three examples; train nothing"
    add("--check-data", action="store_true", default=None, help=text)
    add_record_flags(parser, ModelOptions, ["threads"])
    add_record_flags(parser, FinetuneOptions)
    add_record_flags(parser, ReadOptions)
    add_record_flags(parser, TrainConfig, presets=PRESETS)


def run(args: argparse.Namespace) -> int:
    if args.config:
        apply_run_file(args)
    check_flags(args)
    args.model = None if args.model == "embedded" else args.model  # which is the default
    cfg = config_from_args(args)
    options = options_from_args(args)
    threads = ModelOptions(threads=args.threads).threads
    check_data_names(args.data or ())

    import torch

    from nanovlm.device import keep_freed_memory
    from nanovlm.training.finetuning import check_examples, fine_tune

    for name in ONEDNN_CACHES:
        os.environ.setdefault(name, ONEDNN_CAPACITY)
    if threads is not None:
        torch.set_num_threads(threads)
    keep_freed_memory()
    if args.check_data:
        return check_examples(options)
    fine_tune(options, cfg)
    return 0


def apply_run_file(args: argparse.Namespace) -> None:
    """Set what the file args.config says and the command line does not."""
    try:
        content = json.loads(files.read_text(args.config))
    except FileError as error:
        raise UsageError(f"--config {error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {args.config} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f'--config {args.config} must hold an object as {{"max_steps": 500}}')
    for name, value in content.items():
        if name not in args and name not in TrainConfig.__dataclass_fields__:
            raise UsageError(f"--config {args.config} has {name!r}, which is no setting of a run; remove it")
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def config_from_args(args: argparse.Namespace) -> TrainConfig:
    """The settings of the run: the defaults of its kind, and those that were given."""
    whole, adapters = (JOINED, JOINED_ADAPTERS) if args.backbones else (FINETUNING, ADAPTERS)
    kind = SCENES if args.recipe else adapters if args.lora_rank else whole
    return replace(kind, **given(TrainConfig, args))


def options_from_args(args: argparse.Namespace) -> FinetuneOptions:
    """The model, the data and the folder of the run."""
    return FinetuneOptions(
        **given(FinetuneOptions, args) | {"out": Path(args.out or os.devnull)},
        read=from_args(ReadOptions, args, model_prompt=default_prompt(args.model or "")),
        flags={name: value for name, value in vars(args).items() if name not in NOT_WRITTEN and value is not None},
        automatic=[name for name in AUTOMATIC if args.data and getattr(args, name, None) is None],
    )


def check_flags(args: argparse.Namespace) -> None:
    """UsageError for flags that contradict each other, or that have no effect."""
    where = f" here and in {args.config}" if args.config else ""
    if not (args.data or args.recipe):
        raise UsageError("--data or --recipe is required; name what to learn from")
    for one, other in EXCLUSIVE:
        if all(getattr(args, name) is not None for name in (one, other)):
            raise UsageError(f"{flag_of(one)} and {flag_of(other)} exclude each other; omit one{where}")
    of_data = [f.name for record in (FinetuneOptions, ReadOptions) for f in settings_of(record)]
    of_data = [*of_data, "check_data", "pack", "augment", "lora_rank"] if args.recipe else []
    for name in of_data:
        if name not in FOR_SCENES and getattr(args, name) is not None:
            raise UsageError(f"{flag_of(name)} has no effect with --recipe, which draws its own images; omit it{where}")
    if not (args.out or args.check_data):
        raise UsageError("--out is required; name a folder for the model")
    if args.metric and args.validation in (0, "0"):
        raise UsageError(f"--metric has no effect with --validation 0; omit it{where}")
