"""`nanovlm serve`: a web page and OpenAI's chat completions API."""

import argparse
import os
from pathlib import Path

from nanovlm import EMBEDDED
from nanovlm.cli.options import EMBEDDED_LIMITS, add_record_flags, from_args, load_captioner, model_options
from nanovlm.errors import needs_extra
from nanovlm.options import ModelOptions
from nanovlm.serving.options import ServeOptions

HELP = "Serve a web page and OpenAI's chat completions API."
EXAMPLE = "nanovlm serve --port 8000"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_record_flags(parser, ServeOptions)
    add_record_flags(parser, ModelOptions)


def run(args: argparse.Namespace) -> int:
    model = model_options(args)
    options = serve_options(args)
    with needs_extra("serve", "serve"):
        from nanovlm.serving.app import make_app, serve
        from nanovlm.serving.web import listen
    with listen(options) as listening_socket:  # a port in use is reported before the model is loaded
        captioner = load_captioner(model, images=["those of requests"])
        name = model_name(model.adapter or model.model)
        description = EMBEDDED_LIMITS if model.model == EMBEDDED and model.adapter is None else ""
        serve(make_app(captioner, name, options, description), listening_socket, options, name)
    return 0


def serve_options(args: argparse.Namespace) -> ServeOptions:
    args.api_key = args.api_key or os.environ.get("NANOVLM_API_KEY") or None
    return from_args(ServeOptions, args)


def model_name(model: str | Path) -> str:
    """The name that clients ask for: a folder's own name, whatever path leads to it, or the Hub id."""
    if not os.path.isdir(model):
        return str(model)
    return "nanovlm" if os.path.samefile(model, EMBEDDED) else Path(model).resolve().name
