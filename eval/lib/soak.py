"""A server under a mix of clients for minutes: a modest one, a greedy one, ones that leave and ones that send nonsense.

The modest client, at an address of its own, asks for a caption twice a second and compares it with the answer to a lone
request. For the first fifth of the time, and at least a few answers, it is alone.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
MODEST, OTHERS = "127.0.0.2", "127.0.0.3"  # loopback addresses, so that the server tells the clients apart
PAUSE_S, ALONE, N_GREEDY, N_LEAVING, N_MALFORMED = 0.5, 0.2, 48, 4, 2
MIN_ANSWERS = 3  # alone, and again beside the others, however slow the machine is: a percentile needs them


class Soak:
    """One run of the mix of clients against the server at `url`, whose process is `pid`."""

    def __init__(self, url: str, pid: int, bodies: Sequence[dict[str, Any]], minutes: float, seed: str):
        self.url, self.pid, self.bodies, self.minutes, self.seed = url, pid, bodies, minutes, seed
        self.alone: list[dict[str, float]] = []  # of each answer to the modest client
        self.beside: list[dict[str, float]] = []
        self.statuses: Counter[str] = Counter()
        self.others_may_start, self.done = asyncio.Event(), asyncio.Event()

    async def run(self) -> dict:
        """Latencies of the modest client over time, wrong answers, statuses, and the server's memory, in MiB."""
        counts = {"greedy": N_GREEDY, "leaving": N_LEAVING, "malformed": N_MALFORMED}
        async with self._client(MODEST) as own, self._client(OTHERS) as shared:
            self.expected = [text_of(await post(own, body)) for body in self.bodies]
            self.start = time.monotonic()
            others = [self._other(shared, kind, i) for kind, n in counts.items() for i in range(n)]
            await asyncio.gather(self._modest(own), *others)
        rows = self.alone + self.beside
        return {
            "minutes": self.minutes,
            "modest": {"alone": summary(self.alone), "beside": summary(self.beside)},
            "wrong": sum(not row["right"] for row in rows),
            "statuses": dict(sorted(self.statuses.items())),
            "rows": rows,
        }

    def _client(self, address: str) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(local_address=address, limits=httpx.Limits(max_connections=200))
        return httpx.AsyncClient(transport=transport, base_url=self.url, timeout=300)

    async def _modest(self, client: httpx.AsyncClient) -> None:
        await self._ask(client, self.alone, ALONE)
        self.others_may_start.set()
        await self._ask(client, self.beside, 1.0)
        self.done.set()

    async def _ask(self, client: httpx.AsyncClient, rows: list[dict[str, float]], until: float) -> None:
        """Ask up to a share of the time, and for MIN_ANSWERS at least; rows get what each answer took."""
        while (now := time.monotonic()) < self.start + until * 60 * self.minutes or len(rows) < MIN_ANSWERS:
            i = len(rows) % len(self.bodies)
            response = await post(client, self.bodies[i])
            seconds = time.monotonic() - now
            is_right = response.status_code == 200 and text_of(response) == self.expected[i]
            memory = resident_mib(self.pid)
            rows.append({"at": now - self.start, "s": seconds, "right": is_right, "memory": memory})
            await asyncio.sleep(max(0.0, PAUSE_S - seconds))

    async def _other(self, client: httpx.AsyncClient, kind: str, number: int) -> None:
        rng = Random(f"{self.seed} {kind} {number}")
        await self.others_may_start.wait()
        while not self.done.is_set():
            body: Any = rng.choice(self.bodies)
            with suppress(httpx.HTTPError):
                if kind == "leaving":
                    async with client.stream("POST", CHAT, json=body | {"stream": True}) as response:
                        self.statuses[f"{kind} {response.status_code}"] += 1
                        await anext(response.aiter_bytes(), None)
                    continue
                if kind == "malformed":
                    text = str(body).encode()
                    body = text[: rng.randrange(len(text))]
                response = await post(client, body)
                self.statuses[f"{kind} {response.status_code}"] += 1
                if response.status_code == 429:
                    await asyncio.sleep(rng.random())


async def post(client: httpx.AsyncClient, body: Any) -> httpx.Response:
    return await client.post(CHAT, **({"content": body} if isinstance(body, bytes) else {"json": body}))


def text_of(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


def summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    seconds = [row["s"] for row in rows]
    return {
        "answers": len(rows),
        "median_s": median(seconds),
        "p95_s": quantiles(seconds, n=20, method="inclusive")[-1],
        "memory": rows[-1]["memory"],
    }


def resident_mib(pid: int) -> float:
    """Memory of a process, in MiB; 0 where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def plot(result: dict, file: str) -> None:
    """Latency and memory over time, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    axes = figure.subplots(2, sharex=True)
    at = [row["at"] / 60 for row in result["rows"]]
    axes[0].plot(at, [row["s"] for row in result["rows"]], ".", markersize=2)
    axes[0].set_ylabel("modest client's answer, s")
    axes[1].plot(at, [row["memory"] for row in result["rows"]])
    axes[1].set(ylabel="server's memory, MiB", xlabel="minutes", ylim=(0, None))
    figure.savefig(file, dpi=100, bbox_inches="tight")
