"""`nanovlm serve`: a web page and OpenAI's chat completions API."""

import argparse

from nanovlm.cli.options import add_model_flags
from nanovlm.errors import MissingExtraError

HELP = "Serve a page to ask by hand, and OpenAI's chat completions at /v1 for programs."
EXAMPLE = "nanovlm serve --port 8000"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="an address of this machine; any that others reach needs a key (127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="0 takes any that is free (8000)")
    add("--api-key", metavar="KEY", help="what clients must send; or NANOVLM_API_KEY, which ps does not show")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name to answer to, of a proxy in front, say",
    )
    add("--allow-remote", action="store_true", help="fetch pictures from http(s) URLs, of public addresses only")
    add("--rows", type=int, default=32, metavar="N", help="answers said at once (32)")
    add(
        "--queue",
        type=int,
        default=64,
        metavar="N",
        help="requests that may wait, --max-body each; more are told to come again (64)",
    )
    add("--max-body", type=int, default=20 * 2**20, metavar="BYTES", help="longest request (20 MiB)")
    add("--max-pixels", type=int, default=40_000_000, metavar="N", help="largest picture (40,000,000)")
    add(
        "--timeout",
        type=float,
        default=120,
        metavar="S",
        help="seconds an answer may take, waiting included (120)",
    )
    add_model_flags(parser)
    parser.set_defaults(compile=False)  # a compiled step is for answers one by one


def run(args: argparse.Namespace) -> int:
    try:
        from nanovlm.serving.server import serve_model
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("models", "nanovlm"):
            raise
        raise MissingExtraError(f"{error.name} is missing; pip install 'nanovlm[serve]'") from None
    return serve_model(args)
