"""Who may use the server. Any web page in a browser can send requests to a server on the same machine."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovlm.serving.errors import APIError
from nanovlm.serving.options import ServerOptions

SECURITY_HEADERS = {  # on every response; the page loads nothing from elsewhere
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class BrowserSecurityMiddleware:
    """Refuses requests for foreign host names (DNS rebinding) and from pages of other origins; adds security headers.

    Starlette's TrustedHostMiddleware checks names as well, but its plain text is not an error that OpenAI's clients
    understand, and does not name the way out.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions):
        self.app, self.allowed_hosts, self.allowed_origins = app, options.allowed_hosts, options.allow_origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        try:
            self._check(Headers(scope=scope))
        except APIError as error:
            await JSONResponse(error.body(), error.status)(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send_with_headers)

    def _check(self, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.allowed_hosts is not None and parse_hostname(host) not in self.allowed_hosts:
            raise APIError(403, f"this server does not serve the host name {host!r}; start it with --allow-host to")
        if origin is None or "*" in self.allowed_origins or origin in self.allowed_origins:
            return
        if origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            message = f"pages of {origin!r} may not use this server; open its own page, or start it with --allow-origin"
            raise APIError(403, message)


def parse_hostname(host: str) -> str:
    """The name in a Host header, without the port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def require_api_key(api_key: str | None) -> Callable[..., Awaitable[None]]:
    """A FastAPI dependency that refuses requests without this bearer key; None admits all."""

    async def check(
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> None:
        # HTTP headers are decoded as Latin-1; encoding returns the bytes that the client sent.
        given = credentials.credentials.strip().encode("latin-1") if credentials else b""
        if api_key is not None and not hmac.compare_digest(given, api_key.encode()):
            message = "wrong or missing API key; send it as Authorization: Bearer KEY"
            raise APIError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    return check
