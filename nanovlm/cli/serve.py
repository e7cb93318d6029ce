"""`nanovlm serve`: a web page and OpenAI's chat completions API."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanovlm import EMBEDDED, PROMPT
from nanovlm.cli.options import EMBEDDED_LIMITS, add_model_flags, from_args, load_captioner, model_options
from nanovlm.cli.options import add_flags as add_record_flags
from nanovlm.errors import MissingExtraError, UsageError
from nanovlm.options import ModelOptions
from nanovlm.serving.options import Limits, ServerOptions

if TYPE_CHECKING:
    from nanovlm.serving.service import ChatService

HELP = "Serve a web page and OpenAI's chat completions API."
EXAMPLE = "nanovlm serve --port 8000"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_record_flags(parser, ServerOptions)
    add_record_flags(parser, Limits)
    add_model_flags(parser, without=["adapter"])
    add(
        "--adapter",
        dest="adapters",
        action="append",
        default=[],
        metavar="[NAME=]FOLDER",
        help="LoRA adapters, from nanovlm train --lora-rank or PEFT, which answer requests that name this model "
        "(default: the folder's name); repeat the flag for more; without --model, their own base",
    )
    parser.set_defaults(adapter=None)  # of ModelOptions, so that errors of its values name the flag


def run(args: argparse.Namespace) -> int:
    adapters = adapter_folders(args.adapters)
    model = with_recorded_base(model_options(args), list(adapters.values()))
    options = server_options(args)
    try:
        from nanovlm.serving.server import listen, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("models", "nanovlm"):
            raise
        raise MissingExtraError(f"{error.name} is missing; pip install 'nanovlm[serve]'") from None
    with listen(options) as listening_socket:  # a port in use is reported before the model is loaded
        service = make_service(model, adapters, options)
        description = EMBEDDED_LIMITS if model.model == EMBEDDED and not adapters else ""
        serve(service, listening_socket, options, description)
    return 0


def make_service(model: ModelOptions, adapters: Mapping[str, str], options: ServerOptions) -> "ChatService":
    """The service of a model and its adapters, by their names and folders."""
    from models.inference.adapters import with_adapter
    from nanovlm.processing.image_urls import ImageFetcher
    from nanovlm.serving.service import ChatService

    captioner = load_captioner(model, [PROMPT], own_images=not adapters)
    adapted = {name: with_adapter(captioner.inference, folder) for name, folder in adapters.items()}
    if (name := model_name(model.model)) in adapted:
        raise UsageError(f"--adapter {name} has the model's name; write OTHER_NAME=FOLDER")
    return ChatService(
        captioner,
        name,
        options.limits,
        fetcher=ImageFetcher(allow_remote=options.allow_remote),
        adapters=adapted,
    )


def adapter_folders(texts: Sequence[str]) -> dict[str, str]:
    """The folders of --adapter by their names; UsageError for a name that is given twice."""
    folders: dict[str, str] = {}
    for text in texts:
        name, separator, folder = text.partition("=")
        name, folder = (name, folder) if separator and not os.path.isdir(text) else (Path(text).resolve().name, text)
        if name in folders or not name:
            raise UsageError(f"--adapter {text} has no name of its own; write OTHER_NAME=FOLDER")
        folders[name] = folder
    return folders


def with_recorded_base(model: ModelOptions, adapters: Sequence[str]) -> ModelOptions:
    """The options with the model that the adapters were trained on, if no other is named."""
    bases = []
    for folder in adapters:
        name, revision = replace(model, adapter=folder).base
        bases.append(replace(model, model=name, revision=revision))
    if len(set(bases)) > 1:
        names = " and ".join(sorted({str(base.model) for base in bases}))
        raise UsageError(f"--adapter: these were trained on {names}; serve those of one, or name it by --model")
    return bases[0] if bases else model


def server_options(args: argparse.Namespace) -> ServerOptions:
    api_key = args.api_key or os.environ.get("NANOVLM_API_KEY") or None
    given = argparse.Namespace(**vars(args) | {"api_key": api_key})
    return from_args(ServerOptions, given, limits=from_args(Limits, args))


def model_name(model: str | Path) -> str:
    """The name that clients ask for: a folder's own name, whatever path leads to it, or the Hub id."""
    if not os.path.isdir(model):
        return str(model)
    return "nanovlm" if os.path.samefile(model, EMBEDDED) else Path(model).resolve().name
