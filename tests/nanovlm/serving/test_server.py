"""The server process: its options, its port and the signals that stop it."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from nanovlm import SAMPLE
from nanovlm.errors import UsageError
from nanovlm.serving.options import ServerOptions
from nanovlm.serving.server import listen
from support import ROOT
from support.serving import QUESTIONS, SAMPLE_URL, PlainClient, RunningServer, http, until, user_message

SLOW_SERVER = """
import time
from functools import partial
from nanovlm import Captioner
from nanovlm.console import configure_logging
from nanovlm.serving.options import ServerOptions
from nanovlm.serving.server import listen, serve
from nanovlm.serving.service import ChatService
from support.serving import WatchedBatch, http

configure_logging()
captioner, options = Captioner.from_pretrained(device="cpu"), ServerOptions(port=0)
batch_type = partial(WatchedBatch, before_step=lambda: time.sleep(0.1))
with listen(options) as listening_socket:
    serve(ChatService(captioner, "nanovlm", batch_type=batch_type), listening_socket, options)
"""


@contextlib.contextmanager
def slow_server():
    """A server in a process of its own that needs 0.1 s for a token; the process and the server's URL."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", SLOW_SERVER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            for line in process.stderr:
                if match := re.match(r"http://\S+", line):
                    break
            until(lambda: reachable(match[0]))
            yield process, match[0]
        finally:
            process.kill()


def reachable(url):
    with contextlib.suppress(httpx.TransportError):
        return http.get(f"{url}/health").status_code == 200


def start_stream(url):
    """A streamed answer whose first token has arrived."""
    messages = user_message(QUESTIONS[0], SAMPLE_URL)
    stream = PlainClient(url).chat.completions.create(messages=messages, stream=True)
    next(stream)
    return stream


def test_draining_server_finishes_answers_and_refuses_new_requests(embedded, slow, caplog):
    caplog.set_level(logging.INFO)
    with RunningServer(embedded, batch=slow) as server:
        stream = start_stream(server.url)
        server.server.handle_exit(signal.SIGTERM, None)
        assert "finishing 1 answer;" in caplog.text
        refused = server.post({"messages": user_message("?")})
        assert refused.status_code == 503 and "the server is stopping" in refused.json()["error"]["message"]
        health = http.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == embedded.caption(SAMPLE)
        until(lambda: not server.thread.is_alive())


def test_a_request_that_a_second_signal_ends_gets_an_error_as_any_other(embedded, gate, caplog):
    caplog.set_level(logging.CRITICAL, "uvicorn.error")  # as the signal sets it, but restored
    with ThreadPoolExecutor() as threads, RunningServer(embedded, batch=gate.batch) as server:
        response = threads.submit(server.post, {"messages": user_message("?")})
        until(lambda: server.service.engine.batch.waiting)
        for _ in range(2):
            server.server.handle_exit(signal.SIGTERM, None)
        error = response.result(30).json()["error"]
        gate.set()
        server.service.close()
    assert response.result().status_code == 503 and error["message"].startswith("the server is stopping")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
@pytest.mark.full
@pytest.mark.parametrize("busy", [False, True])
def test_second_signal_stops_at_once_and_so_does_the_first_one_of_an_idle_server(busy):
    with slow_server() as (process, url):
        if busy:
            _stream = start_stream(url)
            process.send_signal(signal.SIGINT)
            until(lambda: http.get(f"{url}/health").status_code == 503)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read().count("\n") == busy, "no traceback"


def test_loopback_names_and_further_ones_are_served():
    assert ServerOptions().allowed_hosts == {"127.0.0.1", "localhost", "::1"}
    assert ServerOptions(host="127.0.0.2", allow_host=("Proxy.example",)).allowed_hosts == {
        "127.0.0.1", "localhost", "::1", "127.0.0.2", "proxy.example",
    }  # fmt: skip
    assert ServerOptions(host="0.0.0.0", api_key="x").allowed_hosts is None, "the key protects it"
    options = ServerOptions(host="0.0.0.0", api_key="x", allow_host=("name.example",))
    assert "name.example" in options.allowed_hosts


def test_port_in_use_is_one_sentence():
    with (
        listen(ServerOptions(port=0)) as listening_socket,
        pytest.raises(UsageError, match="in use; --port 0 takes any free port$"),
    ):
        listen(ServerOptions(port=listening_socket.getsockname()[1]))


@pytest.mark.parametrize("host", ["host.invalid", "192.0.2.1", "\udcff"])
def test_a_host_that_is_not_this_machine_is_one_sentence(host):
    with pytest.raises(UsageError, match="^--host .*; name an address of this machine$"):
        listen(ServerOptions(host=host, api_key="x"))
