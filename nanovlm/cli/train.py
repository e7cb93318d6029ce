"""`nanovlm train`: fine-tune a model on your own data, or train the embedded model from scratch."""

import argparse
import os
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovlm import EMBEDDED
from nanovlm.cli.options import (
    add_read_flags,
    add_threads_flag,
    check_validation,
    read_options_from_args,
)
from nanovlm.cli.run_file import apply_run_file, run_file_text
from nanovlm.errors import InputError, UsageError
from nanovlm.options import DEVICES
from nanovlm.training.config import (
    ADAPTERS,
    BASE_FORMATS,
    FINETUNING,
    SCENES,
    TrainConfig,
)

if TYPE_CHECKING:
    from nanovlm.training.finetuning import FinetuneOptions

HELP = "Train a model. Rerun the same command to resume an interrupted run."
EXAMPLE = "nanovlm train --data photos --out out/mine"
DATA_FLAGS = (  # without effect on --recipe
    "model", "backbones", "format", "revision", "prompt",
    "images", "text_column", "prompt_column", "min_rating", "stream", "validation",
    "on_error", "metric", "epochs", "push_to_hub", "check_data", "quantize",
)  # fmt: skip

EVALUATION_FLAGS = (  # without effect unless examples are held out
    "validate_every", "validation_batches", "validation_questions", "keep_best", "best_by", "patience", "metric",
)  # fmt: skip
VALIDATION_HELP = (
    "hold out N examples, or below 1 a share of them; 0 holds out none (default: a twentieth, at least 10 and at most "
    "200, but none of fewer than 100 examples or of streamed data)"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    task = parser.add_mutually_exclusive_group()  # required, but --config may name it
    task.add_argument(
        "--data",
        nargs="+",
        action="extend",
        metavar="PATH[@SHARE]",
        help="fine-tune on folders, files or Hub data sets of images and texts, each with an optional share of the "
        "examples as in photos@0.3",
    )
    task.add_argument("--recipe", choices=("scenes",), help="scenes: train the embedded model from scratch")
    add = parser.add_argument
    add("--config", metavar="run.yaml", help="take flags from a file, as every run writes one to --out; others win")
    add("--out", metavar="FOLDER", help="folder for the model, checkpoints and metrics; a run found there is resumed")
    add("--device", default="auto", choices=DEVICES)
    add_threads_flag(parser)
    add("--dry-run", action="store_true", help="run 12 steps aside; print peak memory and minutes of the whole run")
    add_data_flags(parser)
    add_config_flags(parser)


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `FinetuneOptions`; None means not given."""
    add = parser.add_argument
    add("--model", metavar="FOLDER_OR_HUB_ID", help="the model to fine-tune (default: the embedded model)")
    add(
        "--backbones",
        nargs=2,
        metavar=("VISION", "LANGUAGE"),
        help="start a new model from a pretrained SigLIP and Llama, folders or Hub ids, instead of --model",
    )
    add(
        "--format",
        choices=("nanovlm", "smolvlm"),
        help="layout of images and chats to train in: smolvlm is that of transformers' SmolVLM, which llama.cpp and "
        "others read (default: the model's own; nanovlm with --backbones)",
    )
    add("--revision", help="branch, tag or commit of a Hub model")
    add("--push-to-hub", metavar="OWNER/NAME", help="upload every saved model to the Hub; a new repository is private")
    add("--epochs", type=float, metavar="N", help="show each example N times, instead of --max-steps")
    add(
        "--quantize",
        choices=BASE_FORMATS,
        help="LoRA: store the frozen weights in bfloat16, 8 bits (int8) or 4 bits (int4), which takes less "
        "memory; adapters are merged into the weights as they were before (default: float32)",
    )
    add_read_flags(parser)
    add("--validation", type=float, metavar="N", help=VALIDATION_HELP)
    add(
        "--metric",
        action="append",
        metavar="NAME",
        help="with held-out examples: score answers by exact_match, f1, vqa_accuracy, anls, rouge_l, cider, or a "
        "module:function(answer, references) of your own (default: all six)",
    )
    add(
        "--keep",
        type=_keep,
        metavar="best,last,N",
        help="which checkpoints to keep: best, last, a number of newest ones; the final model is the best one if it is "
        "kept, else the last (default: best,2; without held-out examples 2)",
    )
    add(
        "--check-data",
        action="store_true",
        default=None,
        help="read all examples, print counts, errors and three examples; train nothing",
    )


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of TrainConfig; None means not given."""
    for f in fields(TrainConfig):
        flag, default, choices = _flag(f.name), getattr(FINETUNING, f.name), f.metadata["choices"]
        others = {"LoRA": getattr(ADAPTERS, f.name), "scenes": getattr(SCENES, f.name)}
        defaults = [str(default), *(f"{name}: {value}" for name, value in others.items() if value != default)]
        help = f"{f.metadata['help']} (default: {'; '.join(defaults)})"
        if f.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=help)
        elif choices:
            parser.add_argument(flag, choices=choices, help=help)
        else:
            parser.add_argument(flag, type=_type_of(f), metavar=f.metadata["metavar"], help=help)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _type_of(field: Any) -> Callable[[str], Any]:
    return field.type


def _keep(text: str) -> str:
    words = text.split(",")
    if any(word not in ("best", "last") and not (word.isdecimal() and int(word)) for word in words):
        raise argparse.ArgumentTypeError(f"{text} is no list of best, last and a number above 0, as best,last,3")
    return text


def keep_settings(text: str) -> dict[str, Any]:
    """The settings that --keep stands for."""
    words = text.split(",")
    numbers = [1 if word == "last" else int(word) for word in words if word == "last" or word.isdecimal()]
    return {"keep_best": "best" in words, "keep_checkpoints": max(numbers, default=1)}


def run(args: argparse.Namespace) -> int:
    from nanovlm.device import set_threads
    from nanovlm.training.distributed import run_and_exit

    if args.config:
        apply_run_file(args, add_flags)
    if bool(args.data) == bool(args.recipe):
        problem = "exclude each other" if args.data else "one of them is required"
        raise UsageError(f"--data and --recipe: {problem}")
    cfg = config_from_args(args)
    check_flags(args, cfg)
    set_threads(args.threads)
    return run_and_exit(lambda: run_scenes(args, cfg) if args.recipe else run_finetuning(args, cfg))


def run_scenes(args: argparse.Namespace, cfg: TrainConfig) -> int:
    """Train the embedded model from scratch, or estimate what that needs."""
    from nanovlm.training.recipes import estimate_scenes, train_scenes

    if args.dry_run:
        print(estimate_scenes(cfg, args.device))
    else:
        from nanovlm.training.finetuning import check_folder, write_run_file

        check_folder(Path(args.out), ())
        write_run_file(Path(args.out), run_file_text(args, add_flags))
        train_scenes(cfg, Path(args.out), args.device)
    return 0


def run_finetuning(args: argparse.Namespace, cfg: TrainConfig) -> int:
    """Fine-tune, check the data, or estimate what fine-tuning needs."""
    from nanovlm.training.finetuning import check_examples, estimate_finetuning, fine_tune

    options = options_from_args(args)
    if args.check_data:
        return check_examples(options)
    if args.dry_run:
        print(estimate_finetuning(options, cfg))
    else:
        fine_tune(options, cfg)
    return 0


def config_from_args(args: argparse.Namespace) -> TrainConfig:
    """The settings of the run: the defaults of its kind, and the flags that were given."""
    if args.recipe and args.lora_rank is not None:
        raise UsageError("--lora-rank has no effect with --recipe, which trains from scratch; omit it")
    given = {f.name: getattr(args, f.name) for f in fields(TrainConfig) if getattr(args, f.name) is not None}
    given = (keep_settings(args.keep) if args.keep else {}) | given
    defaults = SCENES if args.recipe else ADAPTERS if args.lora_rank else FINETUNING
    try:
        return replace(defaults, **given)
    except InputError as error:
        raise UsageError(str(error)) from None


def check_flags(args: argparse.Namespace, cfg: TrainConfig) -> None:
    """UsageError for flags that contradict each other, or that have no effect."""
    if args.recipe:
        for name in DATA_FLAGS:
            if getattr(args, name) is not None:
                raise UsageError(f"{_flag(name)} belongs to --data; --recipe scenes draws its own images")
    no_validation = args.validation == 0 and "with --validation 0"
    without_effect: dict[str, Any] = {
        "lora_alpha": not cfg.lora_rank and "without --lora-rank",
        "lora_words": not cfg.lora_rank and "without --lora-rank",
        "quantize": not cfg.lora_rank and "without --lora-rank",
        "augment": args.recipe and "with --recipe, which shows no image twice",
        "pack": args.recipe and "with --recipe, whose rows are full",
        "decay": cfg.schedule == "cosine" and "with --schedule cosine",
        **dict.fromkeys(EVALUATION_FLAGS, "with --recipe" if args.recipe else no_validation),
        "fsdp": cfg.fsdp and "WORLD_SIZE" not in os.environ and not args.dry_run and "without torchrun",
    }
    for name, reason in without_effect.items():
        if reason and getattr(args, name) is not None:
            raise UsageError(f"{_flag(name)} has no effect {reason}; omit it")
    if args.epochs is not None and not 0 < args.epochs < float("inf"):
        raise UsageError(f"--epochs {args.epochs:g} must be above 0")
    if args.epochs is not None and args.max_steps is not None:
        raise UsageError("--epochs and --max-steps exclude each other; give one")
    if args.quantize and (cfg.fsdp or cfg.compile):
        raise UsageError(f"--quantize and {'--fsdp' if cfg.fsdp else '--compile'} exclude each other; omit one")
    if args.backbones and (args.model or args.revision):
        raise UsageError("--backbones starts a new model; omit --model and --revision")
    if args.check_data and args.dry_run:
        raise UsageError("--check-data and --dry-run exclude each other; run one after the other")
    if not (args.out or args.check_data or args.dry_run):
        raise UsageError("--out is required: the folder for the model")
    if cfg.tensorboard and find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs tensorboard: pip install 'nanovlm[tensorboard]'")
    if cfg.track != "none" and find_spec(cfg.track) is None:
        raise UsageError(f"--track {cfg.track} needs {cfg.track}: pip install 'nanovlm[track]'")
    check_validation(args.validation)


def options_from_args(args: argparse.Namespace) -> "FinetuneOptions":
    from nanovlm.training.finetuning import FinetuneOptions

    return FinetuneOptions(
        data=args.data,
        folder=Path(args.out or "."),
        model=args.model or str(EMBEDDED),
        revision=args.revision,
        backbones=tuple(args.backbones) if args.backbones else None,
        format=args.format,
        device=args.device,
        read=read_options_from_args(args),
        validation=args.validation,
        evaluation_flags=[_flag(name) for name in EVALUATION_FLAGS if getattr(args, name) is not None],
        metrics=args.metric or (),
        epochs=args.epochs,
        push_to_hub=args.push_to_hub,
        quantize=args.quantize,
        run_file=run_file_text(args, add_flags),
        scale_lr=args.lr is None,
    )
