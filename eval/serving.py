"""Latency and throughput of the server, for one client and for many at once, and what its caches save.

    python -m eval.serving    # 32 clients
    python -m eval.serving --minutes 10 --plot soak.png    # a mix of clients instead, see eval.lib.soak

`nanovlm serve` runs in a process of its own; the clients use the openai library from this process, on the same machine.
One client asks about drawn scenes one after another. Then many clients ask at once, several times each, about the same
scenes. Every answer is compared with the one that the single client got. The command fails if a request is lost.

These requests are measured without the server's caches. Then one client has chats of two turns, each about a scene of
its own, with a server without caches, with one that keeps encoded images, and with one that keeps keys and values, too.
"""

import argparse
import asyncio
import base64
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median, quantiles
from typing import Any

import httpx
import openai

from eval.lib.command import add_device_flags, make_parser, positive, progress, report, table
from eval.lib.hardware import environment
from eval.lib.scene_splits import png
from eval.lib.soak import Soak, plot
from nanovlm import PROMPT
from nanovlm.device import choose_device, choose_dtype
from nanovlm.errors import NanoVLMError, UsageError
from nanovlm.synthetic import random_scene

SECOND_QUESTION = "How many objects are there?"
CACHES = {  # what is kept between requests, and the server's flags for it
    "none": ["--image-cache", "0", "--prefix-cache", "0"],
    "images": ["--prefix-cache", "0"],
    "images, keys, values": [],
}
COUNTERS = (
    ("image_cache_hits", "image_cache_queries", "images"),
    ("prefix_cache_hit_tokens", "prefix_cache_query_tokens", "tokens"),
)
SERVER = "import sys; from nanovlm.cli.main import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Answer:
    """A caption, and the seconds until its first text arrived."""

    text: str
    first_text_s: float


def scene_urls(n: int, seed: str) -> list[str]:
    """n scenes of random sizes as data URLs."""
    rng = Random(f"serving {seed}")
    files = (png(random_scene(rng), rng) for _ in range(n))
    return [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]


def first_message(url: str) -> dict[str, Any]:
    """A user's message that asks for the caption of an image."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PROMPT}]
    return {"role": "user", "content": parts}


async def ask(client: openai.AsyncOpenAI, model: str, messages: Any) -> Answer:
    """Stream the answer to a chat."""
    started, first, text = time.perf_counter(), 0.0, ""
    stream: Any = await client.chat.completions.create(model=model, messages=messages, stream=True)
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - started
            text += chunk.choices[0].delta.content
    return Answer(text, first or time.perf_counter() - started)


async def measure(url: str, n_clients: int, rounds: int, seed: str) -> dict:
    """Answers to one client about n_clients scenes, then to n_clients who each ask `rounds` times."""
    chats = [[first_message(image)] for image in scene_urls(n_clients, seed)]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        (model,) = [model.id async for model in client.models.list()]
        await asyncio.gather(*(ask(client, model, chat) for chat in chats))  # warm up
        started = time.perf_counter()
        expected = [await ask(client, model, chat) for chat in chats]
        one = summarize(expected, time.perf_counter() - started)

        async def run_client(i: int) -> list[tuple[int, Answer | None]]:
            answers: list[tuple[int, Answer | None]] = []
            for k in range(rounds):
                index = (i + k) % n_clients
                try:
                    answers.append((index, await ask(client, model, chats[index])))
                except openai.OpenAIError as error:
                    progress(f"client {i}: {error}")
                    answers.append((index, None))
            return answers

        started = time.perf_counter()
        answers = [pair for pairs in await asyncio.gather(*map(run_client, range(n_clients))) for pair in pairs]
        many = summarize([answer for _, answer in answers if answer], time.perf_counter() - started)
    same = sum(answer is not None and answer.text == expected[index].text for index, answer in answers)
    return {"clients": n_clients, "requests": len(answers), "same": same, "one": one, "many": many}


async def measure_turns(url: str, n_chats: int, seed: str) -> dict:
    """Two turns of n_chats about different scenes, one after another, and the hits of the server's caches."""
    first, second = [], []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        (model,) = [model.id async for model in client.models.list()]
        for warm_up in scene_urls(3, f"{seed} warm up"):
            await ask(client, model, [first_message(warm_up)])
        for image in scene_urls(n_chats, f"{seed} turns"):
            chat: list[dict[str, Any]] = [first_message(image)]
            first.append(await ask(client, model, chat))
            chat.append({"role": "assistant", "content": first[-1].text})
            chat.append({"role": "user", "content": SECOND_QUESTION})
            second.append(await ask(client, model, chat))
    return {
        "chats": n_chats,
        "first_turn_s": median(answer.first_text_s for answer in first),
        "second_turn_s": median(answer.first_text_s for answer in second),
        "answers": [answer.text for answer in first + second],
        "metrics": cache_metrics(url),
    }


def cache_metrics(url: str) -> dict[str, float]:
    """The counters of the server's caches."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = [line.removeprefix("nanovlm_").split() for line in lines if re.match(r"nanovlm_\w+_cache_\w+_total ", line)]
    return {name: float(value) for name, value in pairs}


def summarize(answers: Sequence[Answer], seconds: float) -> dict:
    """Count, median and 95th percentile of the time to the first text, and requests per second."""
    seconds_to_first = [answer.first_text_s for answer in answers]
    if len(seconds_to_first) < 2:  # quantiles need two values
        seconds_to_first = (seconds_to_first or [0.0]) * 2
    first = quantiles(seconds_to_first, n=100, method="inclusive")
    return {
        "answered": len(answers),
        "first_text_s": {"median": round(first[49], 4), "p95": round(first[94], 4)},
        "requests_per_s": round(len(answers) / seconds, 2),
    }


def failures(result: dict) -> list[str]:
    lost = result["requests"] - result["many"]["answered"]
    return [f"{lost} requests are lost"] if lost else []


def results_table(result: dict) -> str:
    """Both loads, and the caches: a first and a second turn, and hits."""
    loads = [["", "answered", "first text", "p95", "requests"]]
    for name, load in (("one client", result["one"]), (f"{result['clients']} clients", result["many"])):
        first = [f"{load['first_text_s'][key] * 1000:.0f} ms" for key in ("median", "p95")]
        loads.append([name, str(load["answered"]), *first, f"{load['requests_per_s']:.1f}/s"])
    lost = result["requests"] - result["many"]["answered"]
    checked = f"{lost} of {result['requests']} lost; {result['same']} answers equal the single client's"
    caches = [["caches", "first turn", "second turn", *(f"{what} hit" for *_, what in COUNTERS)]]
    for name, turns in result["turns"].items():
        times = [f"{turns[key] * 1000:.1f} ms" for key in ("first_turn_s", "second_turn_s")]
        counts = {counter: f"{turns['metrics'][f'{counter}_total']:.0f}" for pair in COUNTERS for counter in pair[:2]}
        caches.append([name, *times, *(f"{counts[hits]} of {counts[queries]}" for hits, queries, _ in COUNTERS)])
    return f"{table(loads)}\n{checked}\n\n{table(caches)}"


@contextmanager
def running_server(flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run `nanovlm serve` on a free port; its URL and process id. UsageError with its output if it does not start."""
    command = [sys.executable, "-c", SERVER, "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            lines: list[str] = []
            for line in server.stderr or ():
                if match := re.match(r"http://\S+", line):
                    yield match[0], server.pid
                    return
                lines.append(line.rstrip("\n"))
            raise UsageError(f"the server did not start: {' '.join(lines)}")
        finally:
            server.terminate()


def run_soak(args: argparse.Namespace, flags: Sequence[str], where: str) -> int:
    """Run and report a `Soak`; 1 if an answer was wrong or a status unexpected."""
    bodies = [{"messages": [first_message(image)]} for image in scene_urls(20, args.seed)]
    with running_server(flags) as (url, pid):
        result = asyncio.run(Soak(url, pid, bodies, args.minutes, args.seed).run())
    if args.plot:
        plot(result, args.plot)
    rows = [["modest client", "answers", "median", "p95", "server's memory"]]
    for name, part in result["modest"].items():
        times = [f"{part[key] * 1000:.0f} ms" for key in ("median_s", "p95_s")]
        rows.append([name, f"{part['answers']:,}", *times, f"{part['memory']:.0f} MiB"])
    statuses = ", ".join(f"{name}: {count:,}" for name, count in result["statuses"].items())
    text = f"{table(rows)}\n{result['wrong']} wrong answers; {statuses}"
    odd = [name for name in result["statuses"] if name.split()[1] not in ("200", "400", "429")]
    problems = [f"{result['wrong']} wrong answers"] * bool(result["wrong"]) + [f"unexpected: {name}" for name in odd]
    return report(result, text, where, args.json, problems)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("serving", __doc__)
    parser.add_argument("--model", metavar="FOLDER_OR_HUB_ID", help="(default: the embedded model)")
    parser.add_argument("--clients", type=int, default=32, metavar="N", help="clients at once (default: 32)")
    parser.add_argument("--rounds", type=positive, default=8, metavar="N", help="requests of each client (default: 8)")
    parser.add_argument("--minutes", type=float, metavar="N", help="run a mix of clients for N minutes instead")
    parser.add_argument("--plot", metavar="FILE.png", help="with --minutes: latency and memory over time")
    parser.add_argument("--seed", default="1", help="which scenes (default: 1)")
    add_device_flags(parser)
    args = parser.parse_args(argv)
    if args.clients < 2:
        parser.error(f"--clients {args.clients} must be 2 or more")
    flags = ["--device", args.device, "--dtype", args.dtype, "--max-num-seqs", str(args.clients)]
    flags += ["--model", args.model] if args.model else []
    try:
        device = choose_device(args.device)
        where = environment(device, choose_dtype(args.dtype, device))
        if args.minutes:
            return run_soak(args, flags, where)
        with running_server([*flags, *CACHES["none"]]) as (url, _):
            result = asyncio.run(measure(url, args.clients, args.rounds, args.seed))
        result["turns"] = {}
        for name, cache_flags in CACHES.items():
            with running_server([*flags, *cache_flags]) as (url, _):
                result["turns"][name] = asyncio.run(measure_turns(url, args.clients, args.seed))
    except NanoVLMError as error:
        parser.error(str(error))
    return report(result, results_table(result), where, args.json, failures(result))


if __name__ == "__main__":
    sys.exit(main())
