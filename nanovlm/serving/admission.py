"""The limits of a request: places for its sequences, bytes of its body, pixels in memory, time, and its client."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from nanovlm.serving.errors import APIError, stopping

T = TypeVar("T")

BODY_GRACE_S = 10.0  # before a body that comes slowly is refused
MIN_BODY_RATE = 64 * 1024  # bytes per second
MAX_COMMAS = 100_000  # of a body: to read millions of items as JSON takes seconds, in which no answer goes on


class Budget:
    """Units of something scarce, such as places, threads or images in memory, for the clients that want them.

    No client ever holds the last `reserved` units, and those that wait are served in turn, one request of each client:
    who asks for much waits for itself.
    """

    def __init__(self, size: int, reserved: int = 0):
        self.size = self.n_free = size
        self.share = max(1, size - reserved)  # of one client
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}  # in the order of the clients' turns

    def take(self, client: str, n: int) -> bool:
        """Take n units now if the client may have them."""
        if n > self.n_free or self._held[client] + n > self.share:
            return False
        self.n_free -= n
        self._held[client] += n
        return True

    async def acquire(self, client: str, n: int = 1) -> int:
        """Wait for n units, at most the client's share; returns how many they are."""
        n, turn = min(n, self.share), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((n, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted meanwhile
                self.release(client, n)
            else:
                self._grant()  # those behind it may have waited for it only
            raise
        return n

    def release(self, client: str, n: int = 1) -> None:
        self.n_free += n
        self._held[client] -= n
        self._held = +self._held  # forgets clients that hold nothing
        self._grant()

    def _grant(self) -> None:
        """Serve the clients that wait, one request of each, until the next one does not fit."""
        clients = deque(self._waiting)
        while clients:
            client = clients.popleft()
            requests = self._waiting[client]
            while requests and requests[0][1].done():  # cancelled
                requests.popleft()
            if not requests:
                del self._waiting[client]
            elif self.take(client, requests[0][0]):
                requests.popleft()[1].set_result(None)
                self._waiting[client] = self._waiting.pop(client)  # its next turn comes after everybody else's
                clients.append(client)
            elif self._held[client] + requests[0][0] <= self.share:
                return  # what is free is kept until it is enough


class Admission(Budget):
    """Places for the sequences that run or wait; refuses those beyond them, or all new ones while draining."""

    draining = False

    @property
    def count(self) -> int:
        return self.size - self.n_free

    def admit(self, client: str, n: int, request_scope: ExitStack | AsyncExitStack) -> None:
        """Admit a request of n sequences until request_scope closes; APIError 503 or 429 if that is impossible now."""
        if self.draining:
            raise stopping()
        if not self.take(client, n):
            raise busy(f"all {self.share} places for running and waiting answers are taken")
        request_scope.callback(self.release, client, n)


def busy(message: str) -> APIError:
    return APIError(429, f"{message}; try again in a second", "rate_limit_exceeded", headers={"Retry-After": "1"})


class FairThreads:
    """Threads that every client gets in turn. One more than a client may hold is kept for the others."""

    def __init__(self, n_threads: int):
        self._executor = ThreadPoolExecutor(n_threads, "nanovlm-requests")
        self._budget = Budget(n_threads, reserved=1)

    async def submit(self, client: str, function: Callable[..., T], *args: Any) -> Future[T]:
        """Start function(*args) in a thread of the client's, which holds it until it returns, even if cancelled."""
        loop = asyncio.get_running_loop()
        await self._budget.acquire(client)
        future = self._executor.submit(function, *args)
        future.add_done_callback(lambda _: call_soon(loop, self._budget.release, client))
        return future

    async def run(self, client: str, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.wrap_future(await self.submit(client, function, *args))

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call function(*args) in the thread of an event loop, unless it is closed: then nothing is left to account for."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


class PixelReservation:
    """A client's share of the images in memory. It goes back once it is released and no thread works under it any more.

    A thread cannot be interrupted: when its request times out or is cancelled, it still holds pixels until it returns.
    """

    def __init__(self, budget: Budget, client: str):
        self.budget, self.client = budget, client
        self._size = 0
        self._holders: set[Future[Any] | None] = {None}  # threads, and None until it is released

    async def acquire(self, n_images: int) -> None:
        """Wait for room for n_images, at most the client's share of the budget."""
        self._size = await self.budget.acquire(self.client, n_images)

    async def run(self, threads: FairThreads, function: Callable[..., T], *args: Any) -> T:
        """Call function(*args) in a thread."""
        future, loop = await threads.submit(self.client, function, *args), asyncio.get_running_loop()
        self._holders.add(future)
        future.add_done_callback(lambda _: call_soon(loop, self.release, future))
        return await asyncio.wrap_future(future)

    def release(self, holder: Future[Any] | None = None) -> None:
        self._holders.discard(holder)
        if self._size and not self._holders:
            self.budget.release(self.client, self._size)
            self._size = 0


async def read_body(
    request: Request, max_bytes: int, budget: Budget, client: str, *, grace_s: float = BODY_GRACE_S
) -> bytes:
    """The body of a request; APIError 413 if it has too many bytes or commas, 408 if it comes too slowly.

    A client reads the response only after it has sent its request, so some of a large body is received and dropped.
    budget counts the bytes of all bodies that are being read.
    """
    body, length, held, start = bytearray(), 0, 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(grace_s) as timeout:
            async for chunk in request.stream():
                length += len(chunk)
                timeout.reschedule(start + grace_s + length / MIN_BODY_RATE)
                if length <= max_bytes:
                    if not budget.take(client, len(chunk)):
                        raise busy("too many large requests are being sent")
                    held += len(chunk)
                    body += chunk
                elif length > 8 * max_bytes:
                    break
    except TimeoutError:
        message = (
            f"the request's body came too slowly: {length:,} bytes so far; send it faster than {MIN_BODY_RATE:,}/s"
        )
        raise APIError(408, message, "timeout", headers={"Connection": "close"}) from None
    finally:
        budget.release(client, held)
    if length > max_bytes:
        message = f"the request has more than {max_bytes:,} bytes; send smaller images"
        raise APIError(413, message, headers={"Connection": "close"})
    if body.count(b",") > MAX_COMMAS:
        raise APIError(413, f"the request has more than {MAX_COMMAS:,} commas; send fewer messages, parts or ids")
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
