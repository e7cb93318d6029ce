"""The verb `serve`: a server from its start to its last answer."""

import argparse
import ipaddress
import os
import socket
from pathlib import Path

import uvicorn

from nanovlm import EMBEDDED, PROMPT
from nanovlm.cli.options import EMBEDDED_LIMITS, ModelOptions, load_captioner
from nanovlm.console import print_error
from nanovlm.errors import UsageError
from nanovlm.serving.app import make_app
from nanovlm.serving.service import ChatService, Limits

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_model(args: argparse.Namespace) -> int:
    """Serve args.model until told to stop; then answers are finished first."""
    limits = read_limits(args)
    key = args.api_key or os.environ.get("NANOVLM_API_KEY") or None
    local = is_loopback(args.host)
    if not local and key is None:
        raise UsageError(
            f"--host {args.host} lets others in; choose a key for them by --api-key or, unseen by ps, NANOVLM_API_KEY"
        )
    with listen(args.host, args.port) as door:
        captioner = load_captioner(ModelOptions.from_args(args), [PROMPT], own_images=True)
        embedded = args.model == EMBEDDED
        folder = Path(args.model).resolve().name if os.path.isdir(args.model) else ""  # a name even where that is .
        name = "nanovlm" if embedded else folder or args.model
        desk = ChatService(captioner, name, limits, args.allow_remote)
        hosts = {name.lower() for name in (*LOOPBACK, args.host, *args.allow_host)}
        hosts = hosts if local or args.allow_host else None  # else the key alone decides
        app = make_app(desk, hosts, key, EMBEDDED_LIMITS if embedded else "")
        port, host = door.getsockname()[1], f"[{args.host}]" if ":" in args.host else args.host
        print_error(f"http://{host}:{port} answers as {name!r}: a page, and /v1 for OpenAI's clients; ctrl-c stops")
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, http="h11", ws="none")
        Server(config, desk).run(sockets=[door])
        if desk.engine.alive:  # told twice: a thread within torch aborts an interpreter that goes down
            desk.engine.close()
    return 0


class Server(uvicorn.Server):
    """Told to stop, it finishes its answers and refuses others; told twice, it stops."""

    def __init__(self, config: uvicorn.Config, desk: ChatService):
        super().__init__(config)
        self.desk = desk

    def handle_exit(self, sig, frame) -> None:
        if self.desk.draining:
            self.should_exit = self.force_exit = True
        elif self.desk.taken:
            print_error(f"finishing {self.desk.taken} answers; ctrl-c again stops at once")
        self.desk.draining = True

    async def on_tick(self, counter: int) -> bool:
        self.should_exit |= self.desk.draining and not self.desk.taken
        return await super().on_tick(counter)


def read_limits(args: argparse.Namespace) -> Limits:
    for name, least in (("rows", 1), ("queue", 0), ("max_body", 1), ("max_pixels", 1), ("timeout", 1)):
        if not getattr(args, name) >= least:  # nor is nan
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than {least}")
    return Limits(args.rows, args.queue, args.max_body, args.max_pixels, args.timeout)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise UsageError(f"--host {host} --port {port}: {reason}; --port 0 takes any that is free") from None
