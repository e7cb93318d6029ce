"""`nanovlm serve`: a web page and OpenAI's chat completions API."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nanovlm import EMBEDDED, PROMPT
from nanovlm.cli.options import EMBEDDED_LIMITS, add_model_flags, from_args, load_captioner, model_options
from nanovlm.cli.options import add_flags as add_record_flags
from nanovlm.errors import MissingExtraError
from nanovlm.options import ModelOptions
from nanovlm.serving.options import Limits, ServerOptions

if TYPE_CHECKING:
    from nanovlm.serving.service import ChatService

HELP = "Serve a web page and OpenAI's chat completions API."
EXAMPLE = "nanovlm serve --port 8000"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_record_flags(parser, ServerOptions)
    add_record_flags(parser, Limits)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    model, options = model_options(args), server_options(args)
    try:
        from nanovlm.serving.server import listen, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("models", "nanovlm"):
            raise
        raise MissingExtraError(f"{error.name} is missing; pip install 'nanovlm[serve]'") from None
    with listen(options) as listening_socket:  # a port in use is reported before the model is loaded
        service = make_service(model, options)
        description = EMBEDDED_LIMITS if model.model == EMBEDDED and model.adapter is None else ""
        serve(service, listening_socket, options, description)
    return 0


def make_service(model: ModelOptions, options: ServerOptions) -> "ChatService":
    from nanovlm.processing.image_urls import ImageFetcher
    from nanovlm.serving.service import ChatService

    captioner = load_captioner(model, [PROMPT], own_images=True)
    fetcher = ImageFetcher(allow_remote=options.allow_remote)
    return ChatService(captioner, model_name(model.adapter or model.model), options.limits, fetcher=fetcher)


def server_options(args: argparse.Namespace) -> ServerOptions:
    api_key = args.api_key or os.environ.get("NANOVLM_API_KEY") or None
    given = argparse.Namespace(**vars(args) | {"api_key": api_key})
    return from_args(ServerOptions, given, limits=from_args(Limits, args))


def model_name(model: str | Path) -> str:
    """The name that clients ask for: a folder's own name, whatever path leads to it, or the Hub id."""
    if not os.path.isdir(model):
        return str(model)
    return "nanovlm" if os.path.samefile(model, EMBEDDED) else Path(model).resolve().name
