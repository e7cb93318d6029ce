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

MODEST, OTHERS = "127.0.0.2", "127.0.0.3"  # loopback addresses, so that the server tells the clients apart
PAUSE_S, ALONE, N_GREEDY, N_LEAVING, N_MALFORMED = 0.5, 0.2, 48, 4, 2
MIN_ANSWERS = 3  # alone, and again beside the others, however slow the machine is: a percentile needs them


async def soak(url: str, pid: int, bodies: Sequence[dict[str, Any]], minutes: float, seed: str) -> dict:
    """Latencies of the modest client over time, wrong answers, statuses, and the server's memory, in MiB."""
    alone: list[dict[str, float]] = []  # of each answer to the modest client
    beside: list[dict[str, float]] = []
    statuses: Counter[str] = Counter()

    def open_client(address: str) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(local_address=address, limits=httpx.Limits(max_connections=200))
        return httpx.AsyncClient(transport=transport, base_url=url, timeout=300)

    async def post(client: httpx.AsyncClient, body: Any) -> httpx.Response:
        return await client.post(
            "/v1/chat/completions", **({"content": body} if isinstance(body, bytes) else {"json": body})
        )

    def text_of(response: httpx.Response) -> str:
        return response.json()["choices"][0]["message"]["content"]

    async with open_client(MODEST) as own, open_client(OTHERS) as shared:
        expected = [text_of(await post(own, body)) for body in bodies]

        start = time.monotonic()
        others_may_start, done = asyncio.Event(), asyncio.Event()

        async def modest(rows: list[dict[str, float]], until: float) -> None:
            while (now := time.monotonic()) < until or len(rows) < MIN_ANSWERS:
                i = len(rows)
                response = await post(own, bodies[i % len(bodies)])
                seconds = time.monotonic() - now
                is_right = response.status_code == 200 and text_of(response) == expected[i % len(bodies)]
                rows.append({"at": now - start, "s": seconds, "right": is_right, "memory": resident_mib(pid)})
                await asyncio.sleep(max(0.0, PAUSE_S - seconds))

        async def modest_alone_and_beside() -> None:
            await modest(alone, start + ALONE * 60 * minutes)
            others_may_start.set()
            await modest(beside, start + 60 * minutes)
            done.set()

        async def other(kind: str, number: int) -> None:
            rng = Random(f"{seed} {kind} {number}")
            await others_may_start.wait()
            while not done.is_set():
                body: Any = rng.choice(bodies)
                if kind == "malformed":
                    text = str(body).encode()
                    body = text[: rng.randrange(len(text))]
                with suppress(httpx.HTTPError):
                    if kind == "leaving":
                        async with shared.stream(
                            "POST", "/v1/chat/completions", json=body | {"stream": True}
                        ) as response:
                            statuses[f"{kind} {response.status_code}"] += 1
                            async for _ in response.aiter_bytes():
                                break
                        continue
                    response = await post(shared, body)
                    statuses[f"{kind} {response.status_code}"] += 1
                    if response.status_code == 429:
                        await asyncio.sleep(rng.random())

        counts = {"greedy": N_GREEDY, "leaving": N_LEAVING, "malformed": N_MALFORMED}
        others = [other(kind, i) for kind, n in counts.items() for i in range(n)]
        await asyncio.gather(modest_alone_and_beside(), *others)
    rows = alone + beside
    return {
        "minutes": minutes,
        "modest": {"alone": summary(alone), "beside": summary(beside)},
        "wrong": sum(not row["right"] for row in rows),
        "statuses": dict(sorted(statuses.items())),
        "rows": rows,
    }


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, sharex=True, figsize=(8, 5))
    at = [row["at"] / 60 for row in result["rows"]]
    axes[0].plot(at, [row["s"] for row in result["rows"]], ".", markersize=2)
    axes[0].set_ylabel("modest client's answer, s")
    axes[1].plot(at, [row["memory"] for row in result["rows"]])
    axes[1].set(ylabel="server's memory, MiB", xlabel="minutes", ylim=(0, None))
    figure.savefig(file, dpi=100, bbox_inches="tight")
    pyplot.close(figure)
