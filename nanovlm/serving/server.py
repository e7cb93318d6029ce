"""Runs the server, from an open port to its last answer."""

import ipaddress
import logging
import re
import socket
from dataclasses import dataclass, field
from types import FrameType

import uvicorn

from nanovlm.errors import UsageError
from nanovlm.serving.app import make_app
from nanovlm.serving.limits import Limits
from nanovlm.serving.service import ChatService

logger = logging.getLogger(__name__)

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
BACKLOG = 2048  # connections that wait to be accepted


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, whom it serves and how much it accepts."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 is any free port
    api_key: str | None = None
    allow_hosts: tuple[str, ...] = ()  # further host names to serve
    allow_origins: tuple[str, ...] = ()  # further origins whose pages may use the server; "*" is all
    allow_remote: bool = False  # fetch remote images
    strict_model: bool = False  # refuse requests for other model names
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and self.api_key is None:
            raise UsageError(
                f"--host {self.host} is reachable from other machines and needs a key; set --api-key or, hidden from "
                "ps, NANOVLM_API_KEY"
            )

        for origin in self.allow_origins:
            if origin not in ("*", "null") and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise UsageError(f"--allow-origin {origin!r} is no origin; give for example http://localhost:3000")

    @property
    def allowed_hosts(self) -> set[str] | None:
        """The host names that are served; None is all of them, if other machines may connect: the key protects it."""
        if not is_loopback(self.host) and not self.allow_hosts:
            return None
        return {name.lower() for name in (*LOOPBACK_NAMES, self.host, *self.allow_hosts)}


def listen(options: ServerOptions) -> socket.socket:
    """The open port. Requests wait there until the model is loaded."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise UsageError(
            f"--host {options.host} --port {options.port}: {reason}; --port 0 takes any free port"
        ) from None


def serve(service: ChatService, listening_socket: socket.socket, options: ServerOptions, description: str = "") -> None:
    """Serve until SIGINT or SIGTERM; running answers are finished first."""
    app = make_app(service, options.allowed_hosts, options.api_key, description, options.allow_origins)
    port, host = listening_socket.getsockname()[1], f"[{options.host}]" if ":" in options.host else options.host
    logger.info(
        "http://%s:%d serves %s: a page, and OpenAI's API at /v1; stop it with ctrl-c",
        host,
        port,
        ", ".join(map(repr, service.names)),
    )
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, http="h11", ws="none")
    DrainingServer(config, service).run(sockets=[listening_socket])
    service.close()  # after a second signal, too: Python aborts if a thread is inside torch when it exits


class DrainingServer(uvicorn.Server):
    """At the first signal it refuses new requests and finishes the others; at the second one it stops at once."""

    def __init__(self, config: uvicorn.Config, service: ChatService):
        super().__init__(config)
        self.admission = service.admission

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.admission.draining:
            self.should_exit = self.force_exit = True
        elif self.admission.count:
            logger.info("finishing %d answers; press ctrl-c again to stop at once", self.admission.count)
        self.admission.draining = True

    async def on_tick(self, counter: int) -> bool:
        self.should_exit |= self.admission.draining and not self.admission.count
        return await super().on_tick(counter)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
