"""How soon a server answers one client, and many at once.

    python -m eval.serving    # 32 clients

`nanovlm serve` runs in a process of its own; the clients, of the openai library, are in this one, on the same machine.
One client asks about drawn scenes one after another; then many ask at once, again and again, about the same scenes.
Every answer is held against the one that the single client got. A request that is lost ends in exit code 1.
"""

import asyncio
import base64
import io
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from random import Random
from statistics import quantiles

import openai

from eval.lib.command import make_parser, positive, report
from eval.lib.hardware import environment
from nanovlm import PROMPT
from nanovlm.device import choose_device, choose_dtype
from nanovlm.synthetic import draw, random_scene

SIDES = (96, 512)


def scene_urls(n: int, seed: str) -> list[str]:
    """n scenes of random sizes as data URLs."""
    rng, urls = Random(f"serving {seed}"), []
    for _ in range(n):
        draw(random_scene(rng), rng.randint(*SIDES), rng.randint(*SIDES)).save(file := io.BytesIO(), "png")
        urls.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    return urls


async def ask(client: openai.AsyncOpenAI, model: str, url: str) -> tuple[str, float]:
    """A caption, and the seconds to its first word."""
    started, first, text = time.perf_counter(), None, ""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PROMPT}]
    messages = [{"role": "user", "content": parts}]
    async for chunk in await client.chat.completions.create(model=model, messages=messages, stream=True):
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - started
            text += chunk.choices[0].delta.content
    return text, first or time.perf_counter() - started


async def measure(url: str, n_clients: int, rounds: int, seed: str) -> dict:
    """One client's answers to n_clients scenes, and n_clients' who ask about all of them for so many rounds."""
    pictures = scene_urls(n_clients, seed)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        (model,) = [model.id async for model in client.models.list()]
        await asyncio.gather(*(ask(client, model, picture) for picture in pictures))  # warm
        started = time.perf_counter()
        alone = [await ask(client, model, picture) for picture in pictures]
        one = figures(alone, time.perf_counter() - started)

        async def insist(i: int) -> list[tuple[int, tuple[str, float] | None]]:
            heard = []
            for k in range(rounds):
                which = (i + k) % n_clients
                try:
                    heard.append((which, await ask(client, model, pictures[which])))
                except openai.OpenAIError as error:
                    print(f"client {i}: {error}", file=sys.stderr)
                    heard.append((which, None))
            return heard

        started = time.perf_counter()
        heard = [one for ears in await asyncio.gather(*map(insist, range(n_clients))) for one in ears]
        many = figures([said for _, said in heard if said], time.perf_counter() - started)
    same = sum(said is not None and said[0] == alone[which][0] for which, said in heard)
    return {"clients": n_clients, "asked": len(heard), "same": same, "one": one, "many": many}


def figures(heard: list[tuple[str, float]], seconds: float) -> dict:
    first = quantiles([first for _, first in heard], n=100, method="inclusive")
    return {
        "answered": len(heard),
        "first_word_s": {"median": round(first[49], 4), "p95": round(first[94], 4)},
        "requests_per_s": round(len(heard) / seconds, 2),
    }


def table(result: dict) -> str:
    lines = [f"{'':12} {'answered':>9} {'first word':>11} {'p95':>9} {'requests':>11}"]
    for name, told in (("one client", result["one"]), (f"{result['clients']} clients", result["many"])):
        first = told["first_word_s"]
        lines.append(
            f"{name:12} {told['answered']:9} {first['median'] * 1000:8.0f} ms {first['p95'] * 1000:6.0f} ms "
            f"{told['requests_per_s']:9.1f}/s"
        )
    lost = result["asked"] - result["many"]["answered"]
    lines.append(f"{lost} of {result['asked']} lost; {result['same']} answered as the one client was")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("serving", __doc__)
    parser.add_argument("--model", help="a folder or Hub id (the embedded model)")
    parser.add_argument("--clients", type=int, default=32, metavar="N", help="who ask at once (32)")
    parser.add_argument("--rounds", type=positive, default=8, metavar="N", help="times that each asks (8)")
    parser.add_argument("--seed", default="1", help="which scenes (1)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    args = parser.parse_args(argv)
    if args.clients < 2:
        parser.error(f"--clients {args.clients} must be 2 or more")
    start = "import sys; from nanovlm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    flags = ["--port", "0", "--device", args.device, "--dtype", args.dtype, "--rows", str(args.clients)]
    flags += ["--model", args.model] if args.model else []
    with subprocess.Popen([sys.executable, "-c", start, "serve", *flags], stderr=subprocess.PIPE, text=True) as server:
        try:
            told = []
            while line := server.stderr.readline():
                told.append(line)
                if found := re.match(r"http://\S+", line):
                    break
            else:
                print("".join(told), end="", file=sys.stderr)
                return 2
            result = asyncio.run(measure(found[0], args.clients, args.rounds, args.seed))
        finally:
            server.terminate()
    device = choose_device(args.device)
    where = environment(device, choose_dtype(args.dtype, device))
    lost = result["asked"] - result["many"]["answered"]
    return report(result, table(result), where, args.json, [f"{lost} requests are lost"] * bool(lost))


if __name__ == "__main__":
    sys.exit(main())
