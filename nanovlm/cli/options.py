"""Flags that several verbs share, and the typed options made from them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovlm.console import print_error
from nanovlm.embedded import EMBEDDED, EMBEDDED_LIMITS, PROMPT
from nanovlm.errors import InputError, UsageError

if TYPE_CHECKING:
    from models.decoding import SamplingParams
    from nanovlm.captioner import Captioner
    from nanovlm.data import ReadOptions

EMBEDDED_NOTE = f"note: {EMBEDDED_LIMITS}; --model FOLDER_OR_HUB_ID names a model for photographs"
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")  # of models.inference.quantization
DEVICES = ("auto", "cpu", "cuda", "mps")


def add_renamed(parser: Any, old_flag: str, **options: Any) -> None:
    """Accept the former name of a flag for one release, unlisted; pass the dest and type of its successor."""
    parser.add_argument(old_flag, help=argparse.SUPPRESS, default=argparse.SUPPRESS, **options)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ModelOptions`."""
    add = parser.add_argument
    add(
        "--model",
        default=EMBEDDED,
        metavar="FOLDER_OR_HUB_ID",
        help="a folder or a Hub id, owner/name (default: the embedded model)",
    )
    add("--revision", help="branch, tag or commit of a Hub model")
    add("--device", default="auto", choices=DEVICES)
    add("--dtype", default="auto", choices=DTYPES)
    add_threads_flag(parser)
    add(
        "--quantize",
        choices=QUANTIZATIONS,
        help="int8: weights, and on CPUs with kernels for it activations, in 8 bits; int4: the language model's "
        "weights in 4 bits (default: as --dtype)",
    )
    add(
        "--max-tiles",
        type=int,
        metavar="N",
        help="split an image into at most N tiles: faster, less detail (default: as many as in training)",
    )
    add(
        "--no-skip-special-tokens",
        dest="skip_special_tokens",
        action="store_false",
        help="keep special tokens in answers, as the markup of SmolDocling",
    )
    add("--no-upscale", dest="upscale", action="store_false", help="do not enlarge an image to get more tiles of it")


def add_threads_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        default="auto",
        metavar="N",
        help="CPU threads; auto follows OMP_NUM_THREADS, affinity and a container's quota; on a busy machine 1 may be "
        "many times faster (default: auto)",
    )


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
    add_renamed(parser, "--on-bad-example", dest="on_error", choices=("skip", "stop"))


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ModelOptions` and `GenerationOptions`, without --max-new-tokens."""
    add_model_flags(parser)
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, metavar="X", help="sampling temperature; 0 is greedy (default: 0)")
    add(
        "--top-k", type=int, default=0, metavar="K", help="sample among the K most likely tokens; 0 is all (default: 0)"
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the most likely tokens whose probabilities sum to P (default: 1)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop tokens less likely than P times the most likely one (default: 0)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1, tokens already used become less likely (default: 1)",
    )
    add("--seed", type=int, metavar="N", help="seed of the random generator, for reproducible samples")


@dataclass(frozen=True)
class ModelOptions:
    """Which model runs, where and how: the arguments of `Captioner.from_pretrained`, and the number of threads."""

    model: str | Path = EMBEDDED
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None
    threads: str = "auto"
    max_tiles: int | None = None
    upscale: bool = True
    skip_special_tokens: bool = True

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ModelOptions":
        """The options that args hold; a flag that a verb does not have keeps its default."""
        if getattr(args, "max_tiles", None) is not None and args.max_tiles < 1:
            raise UsageError(f"--max-tiles {args.max_tiles} is less than 1; with 1 an image is resized to one tile")
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__ if hasattr(args, name)})


@dataclass(frozen=True)
class GenerationOptions:
    """How answers are generated."""

    max_new_tokens: int
    sampling: "SamplingParams"

    @classmethod
    def from_args(cls, args: argparse.Namespace, max_new_tokens: int | None = None) -> "GenerationOptions":
        """The options that args hold; max_new_tokens is for a verb whose flag may be absent."""
        from models.decoding import SamplingParams

        if max_new_tokens is None:
            max_new_tokens = args.max_new_tokens
        if max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {max_new_tokens} is less than 1")
        try:
            names = [name for name in SamplingParams.__dataclass_fields__ if hasattr(args, name)]
            sampling = SamplingParams(**{name: getattr(args, name) for name in names})
        except InputError as error:
            raise UsageError(str(error)) from error
        return cls(max_new_tokens, sampling)

    def as_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the Captioner's methods."""
        return {"max_new_tokens": self.max_new_tokens, "sampling": self.sampling}


def load_captioner(
    options: ModelOptions, prompts: Sequence[str] = ("",), max_new_tokens: int = 1, *, own_images: bool = False
) -> "Captioner":
    """Load the model, and check that every prompt and max_new_tokens fit into its context.

    own_images says that the user named images, for which the embedded model is of no use: a note says so.
    """
    from nanovlm.captioner import Captioner
    from nanovlm.device import set_threads

    set_threads(options.threads)
    try:
        captioner = Captioner.from_pretrained(
            options.model,
            options.device,
            options.dtype,
            options.revision,
            max_tiles=options.max_tiles,
            upscale=options.upscale,
            quantize=options.quantize,
            skip_special_tokens=options.skip_special_tokens,
        )
        for prompt in prompts:
            captioner.check_prompt(prompt, max_new_tokens)
    except InputError as error:  # a flag's value, or a prompt that is too long: wrong use, before any work
        raise UsageError(str(error)) from error
    if options.model == EMBEDDED and own_images:
        print_error(EMBEDDED_NOTE)
    return captioner


def check_validation(n: float | None) -> None:
    """UsageError for a --validation that is neither a share below 1 nor a number of examples."""
    if n is not None and not (0 <= n < 1 or (n >= 1 and float(n).is_integer())):
        raise UsageError(f"--validation {n:g} is neither a share below 1 nor a number of examples")


def read_options_from_args(args: argparse.Namespace) -> "ReadOptions":
    from nanovlm.data import ReadOptions

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
