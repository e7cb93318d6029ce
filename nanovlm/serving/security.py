"""Who may ask at all: checked before any route, for a server on one's own machine is near to every web page."""

import hmac
import json
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovlm.serving.protocol import Problem

SAFE = {  # on every response; the page itself loads from nowhere else
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
KEYED = ("/v1/", "/metrics")


class Guard:
    """Middleware. hosts, if given, are the names the server answers to: a page of another name that resolves to this
    machine (DNS rebinding) is refused, and so is whatever comes from the page of another origin."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, api_key: str | None):
        self.app, self.hosts, self.api_key = app, hosts, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SAFE)
            await send(message)

        try:
            self.check(scope["path"], Headers(scope=scope))
        except Problem as problem:
            await refuse(problem, send_safely)
        else:
            await self.app(scope, receive, send_safely)

    def check(self, path: str, headers: Headers) -> None:
        """Raise a Problem for a request that may not come in."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts is not None and hostname(host) not in self.hosts:
            raise Problem(403, f"this server does not answer to the name {host!r}; start it with --allow-host to")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            raise Problem(403, f"a page of {origin!r} may not ask this server; open the server's own page")
        if self.api_key is not None and path.startswith(KEYED):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                key.strip().encode("latin-1"), self.api_key.encode()
            ):
                raise Problem(
                    401,
                    "wrong or missing API key; send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )


def hostname(host: str) -> str:
    """Of a Host header, the name without a port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def refuse(problem: Problem, send: Send) -> None:
    body = json.dumps(problem.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(problem.headers or {})}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
