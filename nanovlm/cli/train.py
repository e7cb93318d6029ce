"""`nanovlm train`: fine-tune a model on your own data, or train the embedded model from scratch."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nanovlm.cli.options import (
    THREADS,
    check_data_names,
    check_validation,
    flag_of,
    from_args,
    given,
    settings_of,
)
from nanovlm.cli.options import add_flags as add_record_flags
from nanovlm.cli.run_file import apply_run_file, run_file_text
from nanovlm.errors import UsageError
from nanovlm.options import ModelOptions, ReadOptions
from nanovlm.training.config import ADAPTERS, AUTOMATIC, FINETUNING, SCENES, TURNED_OFF_BY, FinetuneOptions, TrainConfig

HELP = "Train a model. Rerun the same command to resume an interrupted run."
EXAMPLE = "nanovlm train --data photos --out out/mine"
# In bfloat16 on a CPU, oneDNN compiles code for each sequence length and keeps that of 1024 calls in two caches, which
# grew by 715 MiB in 100 steps of the embedded model. With 64 calls it is 161 MiB after 5 steps and 100, and no slower.
ONEDNN_CACHES, ONEDNN_CAPACITY = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "64"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--config",
        metavar="run.yaml",
        help="take flags from a file, as every run writes one to --out; flags beside it win",
    )
    add("--recipe", choices=("scenes",), help="instead of --data: train the embedded model from scratch")
    add(
        "--dry-run",
        action="store_true",
        default=None,
        help="run 12 steps in a temporary folder; print the peak memory and minutes of the whole run",
    )
    add(
        "--check-data",
        action="store_true",
        default=None,
        help="read all examples, print counts, errors and three examples; train nothing",
    )
    add_record_flags(parser, ModelOptions, ["threads"], threads=THREADS)
    add_record_flags(parser, FinetuneOptions)
    add_record_flags(parser, ReadOptions)
    add_record_flags(parser, TrainConfig, presets={"": FINETUNING, "LoRA": ADAPTERS, "scenes": SCENES})


def run(args: argparse.Namespace) -> int:
    of_evaluation = [name for name, needs in needs_of_flags().items() if needs == "validation"]
    typed = [flag_of(name) for name in of_evaluation if getattr(args, name) is not None]
    if args.config:
        apply_run_file(args, add_flags, needs_of_flags())
    if bool(args.data) == bool(args.recipe):
        problem = "exclude each other" if args.data else "one of them is required"
        raise UsageError(f"--data and --recipe: {problem}")
    check_flags(args)
    cfg, options = config_from_args(args), options_from_args(args, evaluation_flags=typed)
    check_data_names(args.data or ())

    from nanovlm.device import keep_freed_memory, set_threads
    from nanovlm.training.distributed import run_and_exit

    for name in ONEDNN_CACHES:
        os.environ.setdefault(name, ONEDNN_CAPACITY)
    set_threads(args.threads or THREADS)
    keep_freed_memory()
    return run_and_exit(lambda: train_or_estimate(args, options, cfg))


def train_or_estimate(args: argparse.Namespace, options: FinetuneOptions, cfg: TrainConfig) -> int:
    """Train, check the data, or estimate what training needs."""
    from nanovlm.training.finetuning import check_examples, estimate_finetuning, fine_tune

    if args.check_data:
        return check_examples(options)
    if args.dry_run:
        print(estimate_finetuning(options, cfg))
    else:
        fine_tune(options, cfg)
    return 0


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
        run_file=run_file_text(args),
        automatic=[name for name in AUTOMATIC if args.data and getattr(args, name) is None],
    )


def needs_of_flags() -> dict[str, str]:
    """The names of all flags that need something else to have an effect, and what."""
    needs = {f.name: f.metadata["needs"] for cls in (FinetuneOptions, TrainConfig) for f in settings_of(cls)}
    return dict.fromkeys([*(f.name for f in settings_of(ReadOptions)), "check_data"], "data") | needs


def check_flags(args: argparse.Namespace) -> None:
    """UsageError for flags that contradict each other, or that have no effect."""
    unmet = {name: f"with {flag_of(name)} {off}" for name, off in TURNED_OFF_BY.items() if getattr(args, name) == off}
    if args.lora_rank is None:
        unmet["lora_rank"] = "without --lora-rank"
    if args.recipe:
        unmet |= dict.fromkeys(("data", "lora_rank", "validation"), "with --recipe, which draws its own images")
    for name, needs in needs_of_flags().items():
        if needs in unmet and getattr(args, name) is not None:
            raise UsageError(f"{flag_of(name)} has no effect {unmet[needs]}; omit it")
    if args.fsdp and "WORLD_SIZE" not in os.environ and not args.dry_run:
        raise UsageError("--fsdp has no effect without torchrun; omit it")
    pairs = ("epochs", "max_steps"), ("quantize", "fsdp"), ("quantize", "compile"), ("backbones", "model")
    for one, other in (*pairs, ("backbones", "revision"), ("check_data", "dry_run")):
        if all(getattr(args, name) not in (None, False) for name in (one, other)):
            raise UsageError(f"{flag_of(one)} and {flag_of(other)} exclude each other; omit one")
    if not (args.out or args.check_data or args.dry_run):
        raise UsageError("--out is required; name a folder for the model")
    check_validation(args.validation)
