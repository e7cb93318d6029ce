"""`nanovlm train`: fine-tune a model on your own data, or train the embedded model from scratch."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nanovlm.cli.options import add_flags as add_record_flags
from nanovlm.cli.options import (
    check_data_names,
    flag_of,
    from_args,
    given,
    settings_of,
)
from nanovlm.errors import UsageError
from nanovlm.options import ModelOptions, ReadOptions
from nanovlm.training.config import ADAPTERS, AUTOMATIC, FINETUNING, SCENES, TURNED_OFF_BY, FinetuneOptions, TrainConfig

HELP = "Train a model. Rerun the same command to resume an interrupted run."
EXAMPLE = "nanovlm train --data photos --out out/mine"
NOT_WRITTEN = ("config", "debug", "prog", "run", "check_data")  # to run.json
# In bfloat16 on a CPU, oneDNN compiles code for each sequence length and keeps that of 1024 calls in two caches, which
# grew by 715 MiB in 100 steps of the embedded model. With 64 calls it is 161 MiB after 5 steps and 100, and no slower.
ONEDNN_CACHES, ONEDNN_CAPACITY = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "64"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--config",
        metavar="run.json",
        help="take flags from a file, as every run writes one to --out; those of the command line win",
    )
    add("--recipe", choices=("scenes",), help="instead of --data: train the embedded model from scratch")
    add(
        "--check-data",
        action="store_true",
        default=None,
        help="read all examples, print counts, errors and three examples; train nothing",
    )
    add_record_flags(parser, ModelOptions, ["threads"])
    add_record_flags(parser, FinetuneOptions)
    add_record_flags(parser, ReadOptions)
    add_record_flags(parser, TrainConfig, presets={"": FINETUNING, "LoRA": ADAPTERS, "scenes": SCENES})


def run(args: argparse.Namespace) -> int:
    of_evaluation = [name for name, needs in needs_of_flags().items() if needs == "validation"]
    typed = [flag_of(name) for name in of_evaluation if getattr(args, name) is not None]
    if args.config:
        apply_run_file(args)
    if bool(args.data) == bool(args.recipe):
        problem = "exclude each other" if args.data else "one of them is required"
        raise UsageError(f"--data and --recipe: {problem}")
    cfg, options = config_from_args(args), options_from_args(args, evaluation_flags=typed)
    threads = ModelOptions(threads=args.threads).threads
    check_flags(args)
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
        content = json.loads(Path(args.config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {args.config} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f'--config {args.config} must hold an object as {{"max_steps": 500}}')
    for name, value in content.items():
        if name not in args:
            raise UsageError(f"--config {args.config} has {name!r}, which is none of the flags; remove it")
        if getattr(args, name) is None:
            setattr(args, name, value)


def config_from_args(args: argparse.Namespace) -> TrainConfig:
    """The settings of the run: the defaults of its kind, and the flags that were given."""
    defaults = SCENES if args.recipe else ADAPTERS if args.lora_rank else FINETUNING
    return replace(defaults, **given(TrainConfig, args))


def options_from_args(args: argparse.Namespace, evaluation_flags: Sequence[str] = ()) -> FinetuneOptions:
    """The model, the data and the folder of the run."""
    settings = given(FinetuneOptions, args) | {"out": Path(args.out or os.devnull)}
    return FinetuneOptions(
        **settings,
        read=from_args(ReadOptions, args),
        evaluation_flags=evaluation_flags,
        flags={name: value for name, value in vars(args).items() if name not in NOT_WRITTEN and value is not None},
        automatic=[name for name in AUTOMATIC if args.data and getattr(args, name) is None],
    )


def needs_of_flags() -> dict[str, str]:
    """The names of all flags that need something else to have an effect, and what."""
    needs = {f.name: f.metadata["needs"] for cls in (FinetuneOptions, TrainConfig) for f in settings_of(cls)}
    return dict.fromkeys([*(f.name for f in settings_of(ReadOptions)), "check_data"], "data") | needs


def check_flags(args: argparse.Namespace) -> None:
    """UsageError for flags that contradict each other, or that have no effect."""
    where = f" here and in {args.config}" if args.config else ""
    unmet = {name: f"with {flag_of(name)} {off}" for name, off in TURNED_OFF_BY.items() if getattr(args, name) == off}
    if args.lora_rank is None:
        unmet["lora_rank"] = "without --lora-rank"
    if args.recipe:
        unmet |= dict.fromkeys(("data", "lora_rank", "validation"), "with --recipe, which draws its own images")
    for name, needs in needs_of_flags().items():
        if needs in unmet and getattr(args, name) is not None:
            raise UsageError(f"{flag_of(name)} has no effect {unmet[needs]}; omit it{where}")
    for one, other in (("epochs", "max_steps"), ("backbones", "model"), ("backbones", "revision")):
        if all(getattr(args, name) not in (None, False) for name in (one, other)):
            raise UsageError(f"{flag_of(one)} and {flag_of(other)} exclude each other; omit one{where}")
    if not (args.out or args.check_data):
        raise UsageError("--out is required; name a folder for the model")
