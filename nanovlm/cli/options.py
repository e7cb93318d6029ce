"""Flags made from options records and records made from flags; and the flags of data, which several verbs share."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from nanovlm.console import print_error
from nanovlm.embedded import EMBEDDED, EMBEDDED_LIMITS, PROMPT
from nanovlm.errors import InputError, UsageError, usage_error
from nanovlm.options import ModelOptions, ReadOptions

if TYPE_CHECKING:
    from nanovlm.captioner import Captioner

EMBEDDED_NOTE = f"note: {EMBEDDED_LIMITS}; --model FOLDER_OR_HUB_ID names a model for photographs"
THREADS = "auto"  # the library alone leaves PyTorch's number

Record = TypeVar("Record")


def add_flags(parser: Any, record: type, names: Sequence[str] = (), **defaults: Any) -> None:
    """Add a flag for each field of an options record that has a help text, or only for some names.

    A flag that is not given is absent from the parsed arguments, see `from_args`. defaults are a verb's own.
    """
    for f in fields(record):
        if "help" not in f.metadata or (names and f.name not in names):
            continue
        default, flag = defaults.get(f.name, f.default), f"--{f.name.replace('_', '-')}"
        options: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": f.metadata["help"]}
        if isinstance(default, bool):
            flag = flag.replace("--", "--no-", 1) if default else flag
            parser.add_argument(flag, action="store_false" if default else "store_true", **options)
            continue
        text = f.metadata.get("default_text") or (f"{default:g}" if isinstance(default, float) else default)
        text = " ".join(map(str, text)) if isinstance(text, tuple) else text
        if text not in (None, ""):
            options["help"] += f" (default: {text})"
        kind = (get_args(f.type) or (f.type,))[0]
        options |= {key: f.metadata[key] for key in ("choices", "metavar", "nargs", "action") if key in f.metadata}
        parser.add_argument(flag, type=kind, **options)


def from_args(record: type[Record], args: argparse.Namespace, **defaults: Any) -> Record:
    """The record of the flags that args hold; a flag that is not given has the verb's default, else the field's."""
    names = [f.name for f in fields(record)]  # type: ignore[arg-type]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    try:
        return record(**defaults | given)
    except InputError as error:
        raise usage_error(error) from error


def add_model_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Add the flags of `ModelOptions`, but for some fields."""
    names = [f.name for f in fields(ModelOptions) if f.name not in without]
    add_flags(parser, ModelOptions, names, threads=THREADS)


def model_options(args: argparse.Namespace) -> ModelOptions:
    return from_args(ModelOptions, args, threads=THREADS)


def add_threads_flag(parser: argparse.ArgumentParser) -> None:
    """Add --threads alone."""
    help = ModelOptions.__dataclass_fields__["threads"].metadata["help"]
    parser.add_argument("--threads", default=THREADS, metavar="N", help=f"{help} (default: {THREADS})")


def refuse_flags(args: argparse.Namespace, flags: Sequence[str], reason: str) -> None:
    """Raise UsageError if one of some flags is given."""
    for flag in flags:
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} is for {reason}")


def add_read_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ReadOptions`, how data is read; None means not given."""
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help=f"the question for data with captions only (default: {PROMPT!r})")
    add("--images", metavar="FOLDER", help="folder of the images that a .json names (default: the folder of the .json)")
    add("--text-column", metavar="NAME", help="column with the answers (default: text, caption or answer)")
    add("--prompt-column", metavar="NAME", help="column with the questions (default: question or prompt)")
    add("--min-rating", action="append", metavar="NAME=N", help="keep turns rated at least N, as formatting=3")
    add("--stream", action="store_true", default=None, help="read a Hub data set while it is downloaded")
    add("--on-error", choices=("skip", "stop"), help="what to do with an unusable example (default: stop)")


@contextmanager
def as_usage_error(flag: str = "") -> Iterator[None]:
    """Raise an InputError of the block as a UsageError, which flag begins."""
    try:
        yield
    except InputError as error:
        raise UsageError(f"{flag}{error}") from error


def load_captioner(
    options: ModelOptions, prompts: Sequence[str] = (), max_new_tokens: int = 1, *, own_images: bool = False
) -> "Captioner":
    """Load the model, and check that every prompt and max_new_tokens fit into its context.

    own_images says that the user named images, for which the embedded model is of no use: a note says so.
    """
    from nanovlm.captioner import Captioner

    with as_usage_error():
        captioner = Captioner.load(options)
    check_prompts(captioner, prompts, max_new_tokens)
    if options.model == EMBEDDED and options.adapter is None and own_images:
        print_error(EMBEDDED_NOTE)
    return captioner


def check_prompts(captioner: "Captioner", prompts: Sequence[str], max_new_tokens: int) -> None:
    """Raise UsageError for a prompt that even without an image exceeds the model's context."""
    with as_usage_error():
        for prompt in prompts:
            captioner.check_prompt(prompt, max_new_tokens)


def check_validation(n: float | None) -> None:
    """UsageError for a --validation that is neither a share below 1 nor a number of examples."""
    if n is not None and not (0 <= n < 1 or (n >= 1 and float(n).is_integer())):
        raise UsageError(
            f"--validation {n:g} is neither a share below 1 nor a number of examples; name 0.05 or 50, say"
        )


def report_missing(names: Sequence[str]) -> bool:
    """Whether none of some images is there, which is reported before anything is imported to read them."""
    is_missing = bool(names) and not any(name == "-" or os.path.lexists(name) or "://" in name for name in names)
    for name in names if is_missing else ():
        print_error(f"{name if name.isprintable() else repr(name)}: No such file or directory")
    return is_missing


def check_data_names(names: Sequence[str]) -> None:
    """UsageError for a name that can be neither that of a file nor of a Hub data set, before anything is imported."""
    for name in names:
        path = name if os.path.exists(name) else name.rpartition("@")[0] or name
        if not (os.path.exists(path) or "/" in path or path == "scenes"):
            raise UsageError(
                f"--data {path}: no such file or folder, nor a Hub data set like owner/name; correct the path"
            )


def read_options_from_args(args: argparse.Namespace) -> ReadOptions:
    ratings = {}
    for text in args.min_rating or ():
        name, _, minimum = text.partition("=")
        try:
            ratings[name] = float(minimum)
        except ValueError:
            raise UsageError(f"--min-rating {text}: write the name of a rating and a number, as formatting=3") from None
    return ReadOptions(
        prompt=PROMPT if args.prompt is None else args.prompt,
        images=args.images,
        text_column=args.text_column,
        prompt_column=args.prompt_column,
        min_ratings=ratings,
        stream=bool(args.stream),
        skip_errors=args.on_error == "skip",
    )
