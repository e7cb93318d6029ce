"""The limits of a request: places for its sequences, bytes of its body, pixels in memory, time, and its client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from nanovlm.serving.errors import APIError

T = TypeVar("T")


class Admission:
    """Counts the sequences that run or wait, and refuses those beyond the limit, or all new ones while draining."""

    def __init__(self, capacity: int):
        self.capacity, self.count, self.draining = capacity, 0, False

    def acquire(self, request_scope: AsyncExitStack) -> None:
        """Admit a request of one sequence until request_scope closes; APIError 503 or 429 if that is impossible now."""
        if self.draining:
            raise APIError(503, "the server is stopping; try again when it is back", headers={"Retry-After": "5"})
        self.acquire_more(1, request_scope)

    def acquire_more(self, n: int, request_scope: AsyncExitStack) -> None:
        """Admit n more sequences of the same request."""
        if self.count + n > self.capacity:
            message = f"all {self.capacity} places for running and waiting answers are taken; try again in a second"
            raise APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self.count += n
        request_scope.callback(self._release, n)

    def _release(self, n: int) -> None:
        self.count -= n


class PixelBudget:
    """Limits how many images are in memory as pixels. Requests get their share in order of arrival."""

    def __init__(self, max_images: int):
        self.max_images = self.n_free = max_images
        self._semaphore = asyncio.Semaphore(max_images)
        self._turn = asyncio.Lock()  # or two requests could each wait for what the other has acquired already

    async def acquire(self, n_images: int, request_scope: AsyncExitStack) -> "PixelReservation":
        """Wait for room for n_images, at most the whole budget; it is released when request_scope closes, or before."""
        reservation = PixelReservation(self)
        request_scope.callback(reservation.release)
        async with self._turn:
            while reservation.size < min(n_images, self.max_images):
                await self._semaphore.acquire()
                self.n_free -= 1
                reservation.size += 1
        return reservation

    def give_back(self, n_images: int) -> None:
        self.n_free += n_images
        for _ in range(n_images):
            self._semaphore.release()


class PixelReservation:
    """A share of the pixel budget. It goes back once it is released and no thread works under it any more.

    A thread cannot be interrupted: when its request times out or is cancelled, it still holds pixels until it returns.
    """

    def __init__(self, budget: PixelBudget):
        self.size = 0
        self._budget, self._threads, self._released = budget, 0, False

    async def run(self, executor: Executor, function: Callable[..., T], *args: Any) -> T:
        """Call function(*args) in a thread of the executor."""
        loop = asyncio.get_running_loop()

        def on_done(_: Future) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nothing is left to account for
                loop.call_soon_threadsafe(self._thread_done)

        future = executor.submit(function, *args)
        self._threads += 1
        future.add_done_callback(on_done)
        return await asyncio.wrap_future(future)

    def release(self) -> None:
        self._released = True
        self._give_back()

    def _thread_done(self) -> None:
        self._threads -= 1
        self._give_back()

    def _give_back(self) -> None:
        if self._released and not self._threads:
            size, self.size = self.size, 0
            self._budget.give_back(size)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request; APIError 413 if it is too large.

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
