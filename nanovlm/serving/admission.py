"""The limits of a request: a place for it, bytes of its body, time, and its client's presence."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from nanovlm.serving.errors import APIError, stopping

T = TypeVar("T")


class Admission:
    """Counts the requests that run or wait; refuses those beyond its size, or all new ones while draining."""

    def __init__(self, size: int):
        self.size, self.count, self.draining = size, 0, False

    def admit(self, request_scope: AsyncExitStack) -> None:
        """Count a request until request_scope closes; APIError 503 or 429 if that is impossible now."""
        if self.draining:
            raise stopping()
        if self.count >= self.size:
            message = f"all {self.size} places for running and waiting answers are taken; try again in a second"
            raise APIError(429, message, "rate_limit_exceeded", headers={"Retry-After": "1"})
        self.count += 1
        request_scope.callback(self._leave)

    def _leave(self) -> None:
        self.count -= 1


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request; APIError 413 if it has too many bytes.

    A client reads the response only after it has sent its request, so some of a large body is received and dropped.
    """
    body, length = bytearray(), 0
    async for chunk in request.stream():
        length += len(chunk)
        if length <= max_bytes:
            body += chunk
        elif length > 8 * max_bytes:
            break
    if length > max_bytes:
        message = f"the request has more than {max_bytes:,} bytes; send smaller images"
        raise APIError(413, message, headers={"Connection": "close"})
    return bytes(body)


@asynccontextmanager
async def request_deadline(deadline: float, timeout_s: float) -> AsyncIterator[None]:
    """Cancel what runs inside at a time of the event loop's clock, and raise APIError 504."""
    try:
        async with asyncio.timeout_at(deadline) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():  # another one, from inside
            raise
        raise APIError(504, f"no complete answer within {timeout_s:g} s; ask for fewer tokens", "timeout") from None


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work; if the client disconnects first, work is cancelled and ClientDisconnect raised."""
    working, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, disconnected):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
