"""The server under load, failures, departures and signals; and who may use it."""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random

import httpx
import pytest

from models.inference.caches import TiledImage
from nanovlm import SAMPLE
from nanovlm.chat_session import ChatSession
from nanovlm.errors import UsageError
from nanovlm.serving import web
from nanovlm.serving.options import ServeOptions
from nanovlm.synthetic import draw, random_scene
from support import ROOT
from support.serving import (
    QUESTIONS,
    SAMPLE_URL,
    PlainClient,
    RunningServer,
    answer_of,
    chat,
    data_url,
    http,
    until,
    user_message,
)

ASKED = {"messages": user_message("?", SAMPLE_URL)}


def test_answers_under_load_equal_lone_answers(embedded):
    scenes = [draw(random_scene(Random(seed)), 96, 96) for seed in range(4)]
    asked = [(scene, question) for scene in scenes for question in QUESTIONS]
    expected = [embedded.caption(scene, question) for scene, question in asked]
    with RunningServer(embedded, max_num_seqs=5, image_cache=2**26, prefix_cache=2**26) as server:
        with ThreadPoolExecutor(8) as clients:
            bodies = [{"messages": user_message(question, data_url(scene))} for scene, question in asked]
            assert [answer_of(one) for one in clients.map(server.post, bodies)] == expected
        until(lambda: server.idle)


def test_next_turn_computes_only_what_is_new(embedded):
    session, messages, used = ChatSession(embedded, [SAMPLE]), [], []
    with RunningServer(embedded, image_cache=2**26, prefix_cache=2**26) as server:
        for question in QUESTIONS:
            messages += user_message(question, *([] if messages else [SAMPLE_URL]))
            response = server.post({"messages": messages})
            usage = response.json()["usage"]
            used.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
            assert answer_of(response) == "".join(session.ask(question))
            messages.append({"role": "assistant", "content": answer_of(response)})
    assert used[0] > 40 and max(used[1:]) <= 16


def test_full_server_answers_429_and_loses_no_request(embedded, gate):
    with RunningServer(embedded, before_step=gate.wait, max_num_seqs=2, max_pending=3) as server:
        with ThreadPoolExecutor(5) as clients:
            responses = [clients.submit(server.post, ASKED) for _ in range(5)]
            until(lambda: len(server.chats.active) == 5)
            refused = server.post(ASKED)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert "all 5 places" in refused.json()["error"]["message"]
            gate.set()
            assert {answer_of(one.result()) for one in responses} == {embedded.caption(SAMPLE, "?")}
        until(lambda: server.idle)


def test_half_bodies_take_no_place(embedded, monkeypatch):
    monkeypatch.setattr(web, "BODY_SECONDS", 1)
    with RunningServer(embedded, max_num_seqs=2, max_pending=2) as server, contextlib.ExitStack() as stack:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000\r\n\r\n{"
        half = [stack.enter_context(connected(server)) for _ in range(20)]
        for connection in half:
            connection.sendall(head)
        for start in (b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "):  # which may wait
            stack.enter_context(connected(server)).sendall(start)
        assert answer_of(server.post(ASKED)) == embedded.caption(SAMPLE, "?")
        for connection in half:
            reply = received(connection)
            assert reply.startswith(b"HTTP/1.1 408") and b"did not arrive within 1 s" in reply
        until(lambda: not server.chats.arriving)


def test_bodies_that_arrive_have_a_limit_together(embedded):
    places = {"max_num_seqs": 1, "max_pending": 1}
    with RunningServer(embedded, **places, max_body=1000) as server, contextlib.ExitStack() as stack:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n" + b" " * 900
        connections = [stack.enter_context(connected(server)) for _ in range(3)]
        for n, connection in enumerate(connections):
            connection.sendall(head)
            until(partial(lambda n: server.chats.arriving == 900 * n, min(n, 1) + 1))
        assert received(connections[2]).startswith(b"HTTP/1.1 429")


def connected(server):
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    return contextlib.closing(socket.create_connection(address, timeout=10))


def received(connection):
    """All that a server sends until it closes a connection."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


FRAMES = {  # headers of a request that is refused -> its status, and whether the connection ends
    "Transfer-Encoding: chunked": (411, True),
    "Content-Length: 2\r\nTransfer-Encoding: chunked": (400, True),
    "Transfer-Encoding: chunked\r\nContent-Length: 2": (400, True),
    "Content-Encoding: gzip\r\nContent-Length: 2": (415, False),
    "Content-Encoding: identity, br\r\nContent-Length: 2": (415, False),
    "Content-Length: 2": (400, False),
    "Content-Encoding: identity\r\nContent-Length: 2": (400, False),
}


def test_a_body_of_another_framing_is_refused_and_one_in_chunks_ends_the_connection(served):
    for headers, (status, is_closed) in FRAMES.items():
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n\r\n".encode()
        body = b"2\r\n{}\r\n0\r\n\r\n" if "chunked" in headers else b"{}"
        last = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        with connected(served) as connection:
            connection.sendall(head + body + last)
            reply = received(connection)
        assert reply.startswith(b"HTTP/1.1 %d" % status) and (b'"status":"ok"' in reply) != is_closed, headers


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_frees_its_place(embedded, stream, gate, slow):
    body = {"messages": user_message(QUESTIONS[0], SAMPLE_URL), "stream": stream}
    with RunningServer(embedded, before_step=gate.wait, max_num_seqs=1) as server:  # before the first token
        with pytest.raises(httpx.ReadTimeout):
            http.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.3)
        gate.set()
        until(lambda: server.idle)
        assert server.batch.n_steps < 20
        assert answer_of(server.post(body | {"stream": False}))
    with RunningServer(embedded, before_step=slow, max_num_seqs=1) as server:  # behind it
        events = chat(server.client(), stream=True)
        next(events)
        events.close()
        until(lambda: server.idle)
        assert server.batch.n_steps < 20


def test_request_that_takes_too_long_gets_504(embedded, gate):
    with RunningServer(embedded, before_step=gate.wait, timeout=1) as server:
        with ThreadPoolExecutor() as pool:
            for response in pool.map(server.post, [ASKED | {"stream": stream} for stream in (False, True)]):
                assert response.status_code == 504 and "within 1 s" in response.json()["error"]["message"]
        gate.set()
        until(lambda: server.idle)
    with RunningServer(embedded, before_step=lambda: time.sleep(0.08), timeout=1) as server:
        *chunks, last = chat(server.client(), stream=True)
        assert len(chunks) > 2 and "within 1 s" in last.error.message


def test_failed_step_fails_its_requests_and_not_the_server(embedded, caplog):
    failures = [RuntimeError("a secret path")]

    def fail():
        if failures:
            raise failures.pop()

    with RunningServer(embedded, before_step=fail) as server:
        broken = server.batch
        response = server.post(ASKED)
        assert response.status_code == 500 and "secret" not in response.text
        assert "the server's log" in response.json()["error"]["message"] and "a secret path" in caplog.text
        assert answer_of(server.post(ASKED)) == embedded.caption(SAMPLE, "?") and server.batch is not broken
        until(lambda: server.idle)
        server.chats.engine.stop()
        health = http.get(f"{server.url}/health")
        assert health.status_code == server.post(ASKED).status_code == 503 and health.json()["status"] == "stopped"


def test_pixels_are_released_after_prefill(embedded, slow, monkeypatch):
    tiles, init = [], TiledImage.__init__

    def watch(self, *args, **options):
        init(self, *args, **options)
        tiles.append(weakref.ref(self.tiles))

    monkeypatch.setattr(TiledImage, "__init__", watch)
    with RunningServer(embedded, before_step=slow) as server, ThreadPoolExecutor(1) as clients:
        response = clients.submit(server.post, ASKED)
        until(lambda: tiles and tiles[0]() is None)
        assert len(server.chats.active) == 1 and not response.done()


def test_each_request_has_a_line_of_log(embedded, caplog):
    caplog.set_level(logging.INFO, "nanovlm")
    answered = r"POST /v1/chat/completions 200: 1 image, \d+ \+ \d tokens, [\d.]+ s, [\d.]+ tokens/s"
    refused = r"POST /v1/chat/completions 400: the last message must be the user's; .*"
    for quiet, patterns in ((False, [answered, refused]), (True, [])):
        caplog.clear()
        with RunningServer(embedded, quiet=quiet) as server:
            server.post(ASKED | {"max_tokens": 3})
            server.post({"messages": [], "stream": True})
            http.get(f"{server.url}/health")
            until(lambda server=server: server.idle)
        lines = [record.message for record in caplog.records if record.name.startswith("nanovlm")]
        assert len(lines) == len(patterns) and all(map(re.fullmatch, patterns, lines)), lines


ROUTES = [  # that are refused: method, path, status, Allow
    ("GET", "/nowhere", 404, ""), ("GET", "/v1/models/x", 404, ""), ("POST", "/v1/completions", 404, ""),
    ("POST", "/v1/responses", 404, ""), ("POST", "/v1/embeddings", 404, ""), ("DELETE", "/page.cs", 404, ""),
    ("PUT", "/v1/models", 405, "GET, HEAD"), ("OPTIONS", "/v1/chat/completions", 405, "POST"),
    ("GET", "/chat/completions", 405, "POST"), ("POST", "/", 405, "GET, HEAD"),
    ("DELETE", "/page.css", 405, "GET, HEAD"),
]  # fmt: skip


def test_routes_and_their_errors(served, embedded):
    model = http.get(f"{served.url}/v1/models").json()["data"][0]
    assert model["max_model_len"] == embedded.model.cfg.lm_max_position_embeddings
    assert http.get(f"{served.url}/models/nanovlm").json() == model
    for path in ("/", "/base.css", "/page.css", "/page.js", "/sample.png", "/health", "/v1/models"):
        head, get = (http.request(method, served.url + path) for method in ("HEAD", "GET"))
        assert head.status_code == get.status_code == 200 and not head.content
        assert get.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert http.get(served.url + path, params={"file": "/etc/passwd"}).content == get.content
        if path in ("/", "/base.css", "/page.css", "/page.js"):
            assert not re.search(r"https?:|//[a-z]|@import|<style|style=|onclick", get.text), "loads from elsewhere"
    for method, path, status, allowed in ROUTES:
        response = http.request(method, served.url + path)
        assert response.status_code == status and response.json()["error"]["message"], path
        assert {*response.headers.get("allow", "").split(", ")} == {*allowed.split(", ")}, path
    assert {path.suffix for path in web.STATIC.iterdir()} == {".html", ".css", ".js"}


EVIL, FRONT_END, KEY = "https://evil.example", "http://localhost:3000", {"authorization": "Bearer schlüssel".encode()}
OWN, LOCKED = {"allow_origin": (FRONT_END,)}, {"api_key": "schlüssel"}
WHO = [  # options, (headers, status) of requests
    ({}, [
        ({}, 200), ({"host": "localhost:1"}, 200), ({"host": "[::1]:1"}, 200), ({"host": "LOCALHOST"}, 200),
        ({"host": "evil.example"}, 403), ({"host": "127.0.0.1.evil.example"}, 403), ({"host": "["}, 403),
        ({"origin": EVIL}, 403), ({"origin": "null"}, 403), ({"origin": FRONT_END}, 403),
    ]),
    (OWN, [
        ({"origin": FRONT_END}, 200), ({"origin": "http://localhost:3001"}, 403),
        ({"origin": FRONT_END, "host": "evil.example"}, 403),
    ]),
    ({"allow_origin": ("null",)}, [({"origin": "null"}, 200)]),
    ({"allow_origin": ("*",)}, [({"origin": EVIL}, 200)]),
    ({"allow_host": ("name.example",)}, [({"host": "name.example"}, 200)]),
    (LOCKED, [
        (KEY, 200), ({"authorization": "bearer schlüssel".encode()}, 200), ({}, 401),
        ({"authorization": "Bearer wrong"}, 401), ({"authorization": "Basic schlüssel".encode()}, 401),
    ]),
    (LOCKED | OWN, [(KEY | {"origin": EVIL}, 403), ({"origin": FRONT_END}, 401)]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "requests"), WHO, ids=[" ".join(options) for options, _ in WHO])
def test_who_may_use_the_server(embedded, options, requests):
    with RunningServer(embedded, **options) as server:
        for headers, status in requests:
            got = http.get(f"{server.url}/v1/models", headers=headers)
            sent = server.post(ASKED | {"max_tokens": 1}, headers=headers)
            assert got.status_code == sent.status_code == status, headers
            if status == 403:  # the way out is named
                why = got.json()["error"]["message"]
                assert headers.get("host", headers.get("origin")) in why and "add " in why and " with --allow-" in why
            if headers.get("origin") in options.get("allow_origin", ()) and status != 403:
                assert sent.headers["access-control-allow-origin"] == headers["origin"], "pages may read errors, too"
            if "origin" in headers:
                asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
                preflight = http.options(f"{server.url}/v1/chat/completions", headers=headers | asked)
                assert (preflight.status_code == 200) == (status != 403)
        assert http.get(f"{server.url}/health").status_code == http.get(server.url).status_code == 200


SLOW_SERVER = """
import time
from nanovlm import Captioner
from nanovlm.console import configure_logging
from nanovlm.serving.app import make_app, serve
from nanovlm.serving.options import ServeOptions
from nanovlm.serving.web import listen
from support.serving import watch

configure_logging()
options = ServeOptions(port=0, quiet=True)
captioner = watch(Captioner.from_pretrained(device="cpu"), before_step=lambda: time.sleep(0.03))
with listen(options) as port:
    serve(make_app(captioner, "nanovlm", options), port, options, "nanovlm")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
@pytest.mark.parametrize("n_signals", [1, pytest.param(2, marks=pytest.mark.full)])
def test_process_ends_in_order(n_signals, embedded):
    """The first signal waits for the answer; the second one does not."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", SLOW_SERVER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        url = next(match[0] for line in server.stderr if (match := re.match(r"http://\S+", line)))
        events, text = chat(PlainClient(url), stream=True), ""  # waits at the open port until the model is loaded
        while not text:
            text += next(events).choices[0].delta.content
        for _ in range(n_signals):
            server.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        with contextlib.suppress(httpx.TransportError):
            text += "".join(chunk.choices[0].delta.content or "" for chunk in events if chunk.choices)
        assert server.wait(20) == 0
        assert re.fullmatch("finishing 1 answer; .*\n", server.stderr.read()), "no traceback"
        assert (text == embedded.caption(SAMPLE)) == (n_signals == 1)


def test_what_cannot_be_listened_to_is_one_sentence():
    """The command line's refusals are in tests/nanovlm/cli/test_wrong_use.py."""
    with pytest.raises(UsageError, match="^--api-key is empty"):
        ServeOptions(host="0.0.0.0", api_key="")
    with pytest.raises(UsageError, match="^--host .*; name an address of this machine$"):
        web.listen(ServeOptions(host="\udcff", api_key="x"))
    with web.listen(ServeOptions(port=0)) as port, pytest.raises(UsageError, match="--port 0 takes any free port$"):
        web.listen(ServeOptions(port=port.getsockname()[1]))
