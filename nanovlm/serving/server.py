"""Runs the server, from an open port to its last answer."""

import errno
import logging
import socket
from types import FrameType

import uvicorn

from nanovlm.console import count
from nanovlm.errors import UsageError
from nanovlm.serving.app import make_app
from nanovlm.serving.options import ServerOptions
from nanovlm.serving.service import ChatService

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that wait to be accepted


def listen(options: ServerOptions) -> socket.socket:
    """The open port. Requests wait there until the model is loaded."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except (OSError, TypeError) as error:  # TypeError: a host that is no text for the network
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        port_taken = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        remedy = "--port 0 takes any free port" if port_taken else "name an address of this machine"
        raise UsageError(f"--host {options.host} --port {options.port}: {reason}; {remedy}") from None


def serve(service: ChatService, listening_socket: socket.socket, options: ServerOptions, description: str = "") -> None:
    """Serve until SIGINT or SIGTERM; running answers are finished first."""
    app = make_app(service, options, description)
    port, host = listening_socket.getsockname()[1], f"[{options.host}]" if ":" in options.host else options.host
    logger.info(
        "http://%s:%d serves %s: a page, and OpenAI's API at /v1; stop it with ctrl-c",
        host,
        port,
        repr(service.name),
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
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # no traceback of each answer that is cut off
            self.should_exit = self.force_exit = True
        elif self.admission.count:
            logger.info("finishing %s; press ctrl-c again to stop at once", count(self.admission.count, "answer"))
        self.admission.draining = True

    async def on_tick(self, counter: int) -> bool:
        self.should_exit |= self.admission.draining and not self.admission.count
        return await super().on_tick(counter)
