"""`nanovlm serve`: a web page and OpenAI's chat completions API."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nanovlm import EMBEDDED, PROMPT
from nanovlm.cli.options import EMBEDDED_LIMITS, add_model_flags, load_captioner, model_options
from nanovlm.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from nanovlm.serving.server import ServerOptions

HELP = "Serve a web page and OpenAI's chat completions API."
EXAMPLE = "nanovlm serve --port 8000"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address of this machine to listen on; one that other machines can reach needs a key (default: 127.0.0.1)",
    )
    add("--port", type=int, default=8000, metavar="N", help="port to listen on; 0 is any free one (default: 8000)")
    add("--api-key", metavar="KEY", help="key that clients must send; ps does not show it in NANOVLM_API_KEY")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="further host name to serve, for example a proxy's",
    )
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose pages may use the server from a browser, for example http://localhost:3000; '*' is all",
    )
    add("--strict-model", action="store_true", help="refuse requests for another model's name")
    add("--allow-remote", action="store_true", help="fetch images from http(s) URLs of public addresses")
    add_limit_flags(parser)
    add_model_flags(parser)


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `Limits`."""
    add = parser.add_argument
    add("--max-num-seqs", type=int, default=32, metavar="N", help="sequences decoded at once (default: 32)")
    add(
        "--max-pending",
        type=int,
        default=64,
        metavar="N",
        help="sequences that may wait, --max-body each; clients of more get 429 (default: 64)",
    )
    add("--max-body", type=int, default=20 * 2**20, metavar="BYTES", help="size of a request (default: 20 MiB)")
    add(
        "--image-cache",
        type=int,
        default=128 * 2**20,
        metavar="BYTES",
        help="memory for encoded images, which are not encoded again; 0 keeps none (default: 128 MiB)",
    )
    add(
        "--prefix-cache",
        type=int,
        default=256 * 2**20,
        metavar="BYTES",
        help="memory for keys and values of earlier chats, whose next turn computes only what is new; 0 keeps none "
        "(default: 256 MiB)",
    )
    add("--max-pixels", type=int, default=40_000_000, metavar="N", help="pixels of an image (default: 40,000,000)")
    add(
        "--timeout",
        type=float,
        default=120,
        metavar="S",
        help="seconds for a request, waiting included (default: 120)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        from nanovlm.serving.server import listen, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("models", "nanovlm"):
            raise
        raise MissingExtraError(f"{error.name} is missing; pip install 'nanovlm[serve]'") from None
    options = server_options(args)
    with listen(options) as listening_socket:  # a port in use is reported before the model is loaded
        model = model_options(args)
        captioner = load_captioner(model, [PROMPT], own_images=True)
        description = EMBEDDED_LIMITS if model.model == EMBEDDED else ""
        serve(captioner, model_name(model.model), listening_socket, options, description)
    return 0


def server_options(args: argparse.Namespace) -> "ServerOptions":
    from nanovlm.serving.admission import Limits
    from nanovlm.serving.server import ServerOptions

    minima = {"max_num_seqs": 1, "max_body": 1, "max_pixels": 1, "timeout": 1}
    for name, minimum in (minima | {"max_pending": 0, "image_cache": 0, "prefix_cache": 0}).items():
        if not getattr(args, name) >= minimum:  # true for nan as well
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than {minimum}")
    limits = Limits(
        max_num_seqs=args.max_num_seqs,
        max_pending=args.max_pending,
        max_body_bytes=args.max_body,
        max_pixels=args.max_pixels,
        timeout_s=args.timeout,
        image_cache_bytes=args.image_cache,
        prefix_cache_bytes=args.prefix_cache,
    )
    return ServerOptions(
        host=args.host,
        port=args.port,
        api_key=args.api_key or os.environ.get("NANOVLM_API_KEY") or None,
        allow_hosts=tuple(args.allow_host),
        allow_origins=tuple(args.allow_origin),
        allow_remote=args.allow_remote,
        strict_model=args.strict_model,
        limits=limits,
    )


def model_name(model: str | Path) -> str:
    """The name that clients ask for: a folder's own name, whatever path leads to it, or the Hub id."""
    if model == EMBEDDED:
        return "nanovlm"
    return Path(model).resolve().name if os.path.isdir(model) else str(model)
