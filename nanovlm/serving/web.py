"""Shared by the server and the review of captions: who may use them, bodies, files of pages, errors and the port."""

import asyncio
import errno
import logging
import re
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.common.errors import shortened
from nanovlm.console import count
from nanovlm.errors import UsageError
from nanovlm.serving.options import LOOPBACK_NAMES, ServeOptions

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
GET = ["GET", "HEAD"]
PORT = re.compile(r":\d*$")  # in a Host header
BODY_SECONDS = 10.0  # for a body to arrive
# Longer than clients keep a connection (httpx 5 s, nginx 60 s): one that closes as a request is sent loses its answer.
KEEP_ALIVE_SECONDS = 75
HEADERS = {  # of every response; the page loads nothing from elsewhere
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class APIError(Exception):
    """An HTTP error for the client: a status and one sentence. param is the client's field."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, headers: Any = None
    ):
        texts = (shortened(text).encode(errors="backslashreplace").decode() for text in (message, param or ""))
        message, param = texts  # a client may have escaped half a character
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param or None
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


class Gate:
    """Refuses foreign host names (DNS rebinding), pages of other origins, and bodies that are packed or in chunks.

    Any web page in a browser can send requests to a server on the same machine. hosts are the names that it serves;
    None is all of them.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None = LOOPBACK_NAMES, origins: Collection[str] = ()):
        self.app = app
        self.hosts = hosts
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self.app
        if problem := self._refusal(Headers(scope=scope)):
            scope.setdefault("state", {})["problem"] = problem
            app = problem.response
        await app(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers) -> APIError | None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if "transfer-encoding" in headers:  # parsing chunks of one byte would hold up all others
            status = 400 if "content-length" in headers else 411
            return APIError(status, "send a body whole, by its Content-Length alone", headers={"Connection": "close"})
        if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
            return APIError(415, f"a body in Content-Encoding {coding!r}; send it as it is")
        if self.hosts is not None and PORT.sub("", host).strip("[]").lower() not in self.hosts:
            return APIError(403, f"{host!r} is no host name of this server; add it with --allow-host")
        own = (f"http://{host}".lower(), f"https://{host}".lower())
        if origin is None or origin.lower() in own or "*" in self.origins or origin in self.origins:
            return None
        message = f"pages of {origin!r} may not use this server; open its own page, or add them with --allow-origin"
        return APIError(403, message)


async def read_body(
    http: Request, max_bytes: int, count_arriving: Callable[[int], None] = lambda n_bytes: None
) -> bytes:
    """The body of a request. APIError 413 if it is too large, 408 if it is late.

    count_arriving is told the bytes that are kept of each piece, and at the end minus their sum. A client reads the
    response only after it has sent its request, so the rest of a large body is received and dropped.
    """
    body = bytearray()
    length = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in http.stream():
                length += len(chunk)
                if length <= max_bytes:
                    body += chunk
                    count_arriving(len(chunk))
    except TimeoutError:
        message = f"the request's body did not arrive within {BODY_SECONDS:g} s; send it at once, or less"
        raise APIError(408, message, "timeout", headers={"Connection": "close"}) from None
    finally:
        count_arriving(-len(body))
    if length > max_bytes:
        raise APIError(413, f"the request has more than {max_bytes:,} bytes; send smaller images")
    return bytes(body)


def add_page(router: APIRouter, folder: Path, *others: Path) -> None:
    """Serve a folder's index.html as the page at /, and it and other files by their names."""

    def send(file: Path) -> Callable[[], FileResponse]:
        return lambda: FileResponse(file)

    router.add_api_route("/", send(folder / "index.html"), methods=GET)
    for file in (*folder.iterdir(), *others):
        router.add_api_route(f"/{file.name}", send(file), methods=GET)


def listen(options: ServeOptions) -> socket.socket:
    """The open port. Requests wait there until the model is loaded."""
    import mimetypes

    mimetypes.add_type("text/javascript", ".js")  # text/plain in some registries of Windows, which browsers refuse
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except (OSError, TypeError) as error:  # TypeError: a host that is no text for the network
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        port_taken = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        remedy = "--port 0 takes any free port" if port_taken else "name an address of this machine"
        raise UsageError(f"--host {options.host} --port {options.port}: {reason}; {remedy}") from None


class Server(uvicorn.Server):
    """Finishes active answers at the first signal, and stops at once at the second. `run` returns, and raises none."""

    def __init__(self, app: FastAPI, active: Collection[object] = ()):
        config = uvicorn.Config(
            app, port=0, http="h11", ws="none", log_level="critical", server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )  # fmt: skip
        super().__init__(config)
        self.active = active

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.active and not self.should_exit:
            logger.info("finishing %s; press ctrl-c again to stop at once", count(len(self.active), "answer"))
        self.force_exit = self.should_exit
        self.should_exit = True
