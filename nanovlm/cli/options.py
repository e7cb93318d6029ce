"""Flags made from options records, and records made from flags; checks that several verbs share."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from nanovlm.console import print_error, printable
from nanovlm.embedded import EMBEDDED, EMBEDDED_LIMITS, SAMPLE
from nanovlm.errors import UsageError
from nanovlm.options import ModelOptions, parse_data

if TYPE_CHECKING:
    from nanovlm.captioner import Captioner

EMBEDDED_NOTE = f"note: {EMBEDDED_LIMITS}; --model FOLDER_OR_HUB_ID names a model for photographs"
METAVARS = {int: "N", float: "X"}
MODEL_FLAGS = ("model", "adapter", "device", "dtype", "quantize", "max_tiles")  # of verbs that answer

Record = TypeVar("Record")


def settings_of(record: type) -> list[Field]:
    """The fields of an options record that have a flag."""
    return [f for f in fields(record) if f.metadata.get("help")]


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_record_flags(
    parser: Any, record: type, names: Sequence[str] = (), presets: Mapping[str, Any] | None = None, **defaults: Any
) -> None:
    """Add a flag for each setting of a record, or only for some names; None means not given, see `from_args`.

    The help names the default: the verb's own, in defaults; or those of the presets, the value of the first and those
    that differ from it; or the field's.
    """
    for f in settings_of(record):
        if names and f.name not in names:
            continue
        options = {key: f.metadata[key] for key in ("choices", "metavar", "nargs", "action") if key in f.metadata}
        default = defaults.get(f.name, f.default)
        text = f.metadata.get("default_text") or _default_text(default)
        if presets:
            (_, text), *others = [(name, _default_text(getattr(preset, f.name))) for name, preset in presets.items()]
            text += "".join(f"; {name}: {other}" for name, other in others if other != text)
        if isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction
        elif "choices" not in options:
            kind = next((kind for kind in (*get_args(f.type), f.type) if kind in (str, int, float)), str)
            options = {"type": kind, "metavar": METAVARS.get(kind)} | options
        help = f.metadata["help"] + (f" (default: {text})" if text else "")
        parser.add_argument(flag_of(f.name), dest=f.name, default=None, help=help, **options)


def _default_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else "" if value in (None, Path()) else str(value)


def given(record: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a record that args hold."""
    return {f.name: value for f in fields(record) if (value := getattr(args, f.name, None)) is not None}


def from_args(record: type[Record], args: argparse.Namespace, **defaults: Any) -> Record:
    """The record of the flags that args hold; a flag that is not given has the verb's default, else the field's."""
    return record(**defaults | given(record, args))


def model_options(args: argparse.Namespace) -> ModelOptions:
    if args.model == "embedded":
        args.model = EMBEDDED
    return from_args(ModelOptions, args)


def refuse_flags(args: argparse.Namespace, flags: Sequence[str], reason: str) -> None:
    """Raise UsageError if one of some flags is given."""
    for flag in flags:
        if getattr(args, flag) is not None:
            raise UsageError(f"{flag_of(flag)} is for {reason}")


def load_captioner(
    options: ModelOptions, prompts: Sequence[str] = (), max_new_tokens: int = 1, *, images: Sequence[str] = ()
) -> "Captioner":
    """Load the model, check that prompts and max_new_tokens fit its context, and note if it is of no use for images."""
    from nanovlm.captioner import Captioner

    captioner = Captioner.load(options)
    for prompt in prompts:
        captioner.check_prompt(prompt, max_new_tokens)
    are_own = any(not (os.path.exists(name) and os.path.samefile(name, SAMPLE)) for name in images)
    if options.model == EMBEDDED and options.adapter is None and are_own:
        print_error(EMBEDDED_NOTE)
    return captioner


def report_missing(names: Sequence[str]) -> bool:
    """Check whether all images are missing, and say so, before anything is imported to read them."""
    is_missing = bool(names) and not any(name == "-" or os.path.lexists(name) or "://" in name for name in names)
    for name in names if is_missing else ():
        print_error(f"{printable(name)}: No such file or directory")
    return is_missing


def check_data_names(names: Sequence[str]) -> None:
    """Raise UsageError for a name of neither a file nor a Hub data set, before anything is imported."""
    for name in names:
        path, _ = parse_data(name)
        if not (os.path.exists(path) or "/" in path or path == "scenes"):
            problem = "no such file or folder, nor a Hub data set like owner/name; correct the path"
            raise UsageError(f"--data {path}: {problem}")
