"""One client's excess slows nobody else."""

import asyncio
import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.requests import Request

from nanovlm import Captioner
from nanovlm.processing.processor import Processor
from nanovlm.serving.admission import Budget, read_body
from nanovlm.serving.errors import APIError
from nanovlm.serving.options import Limits
from support.captioners import WatchedProcessor
from support.serving import QUESTIONS, SAMPLE_URL, RunningServer, answer_of, until, user_message

GREEDY = {"x-forwarded-for": "192.0.2.1"}  # as a proxy on this machine names its client
MODEST = {"x-forwarded-for": "192.0.2.2"}


def test_clients_get_their_units_in_turn():
    async def serve():
        budget, served = Budget(4, reserved=1), []

        async def ask(client, n):
            served.append((client, await budget.acquire(client, n)))

        tasks = [asyncio.create_task(ask(*one)) for one in [("a", 9), ("a", 1), ("a", 1), ("b", 2), ("c", 1)]]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert served == [("a", 3)] and budget.n_free == 1, "b waits for two, and c does not overtake it"
        tasks[1].cancel()
        budget.release("a", 3)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert served[1:] == [("a", 1), ("b", 2), ("c", 1)]
        for client, n in served[1:]:
            budget.release(client, n)
        assert budget.n_free == 4 and budget.take("a", 3) and not budget.take("a", 1) and budget.take("b", 1)

    asyncio.run(serve())


def test_threads_are_not_held_by_one_client(embedded):
    go_on, held_questions = threading.Event(), []

    def hold(question):
        if question == "greedy":
            held_questions.append(question)
            go_on.wait(30)

    captioner = Captioner(embedded.model, WatchedProcessor(embedded.processor, before_prompt=hold))
    with RunningServer(captioner, Limits(max_num_seqs=16)) as server, ThreadPoolExecutor(8) as clients:
        greedy = {"messages": user_message("greedy"), "max_tokens": 2}
        held = [clients.submit(server.post, greedy, headers=GREEDY) for _ in range(8)]
        until(lambda: server.service.admission.count == 8 and held_questions)
        answer = server.post({"messages": user_message(QUESTIONS[0], SAMPLE_URL)}, headers=MODEST)
        assert answer_of(answer) == embedded.caption("nanovlm/assets/sample.png")
        assert not any(one.done() for one in held)
        go_on.set()
        assert {one.result().status_code for one in held} == {200}


def test_places_are_not_taken_by_one_client(embedded, gate):
    body = {"messages": user_message("?", SAMPLE_URL), "max_tokens": 2}
    limits = Limits(max_num_seqs=16, max_pending=16)
    with RunningServer(embedded, limits, batch=gate.batch) as server, ThreadPoolExecutor(32) as clients:
        greedy = [clients.submit(server.post, body, headers=GREEDY) for _ in range(30)]
        until(lambda: server.service.admission.count == 30 and server.service.engine.batch.waiting)
        assert server.post(body, headers=GREEDY).status_code == 429
        modest = clients.submit(server.post, body, headers=MODEST)
        until(lambda: server.service.decoding_budget.n_free == 0)
        assert server.service.admission.count == 31, "the modest one is in the batch, 15 greedy ones wait"
        gate.set()
        assert modest.result().status_code == 200 and {one.result().status_code for one in greedy} == {200}
        until(lambda: server.idle and server.service.decoding_budget.n_free == 16)


def test_half_sent_bodies_keep_nobody_out(served):
    body = json.dumps({"messages": user_message("?"), "max_tokens": 2}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    host, port = served.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as sockets:
        for _ in range(served.service.admission.size + 1):
            half = sockets.enter_context(socket.create_connection((host, int(port))))
            half.sendall(head + body[:1])
        assert served.service.admission.count == 0
        assert served.post(body).status_code == 200
        half.sendall(body[1:])
        assert half.recv(100).startswith(b"HTTP/1.1 200")


def test_body_that_does_not_come_is_refused():
    async def receive():
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": True}
        await asyncio.sleep(60)

    sent, budget = [b"{"], Budget(100)
    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(APIError, match="too slowly: 1 bytes so far") as error:
        asyncio.run(read_body(request, 100, budget, "a", grace_s=0.01))
    assert error.value.status == 408 and budget.n_free == 100


def test_text_longer_than_the_context_is_not_tokenized(embedded):
    class Untouched(type(embedded.tokenizer)):
        def encode(self, text):
            assert len(text) <= 16 * self.cfg.lm_max_position_embeddings, "its longest token has 16 characters"
            return super().encode(text)

    tokenizer = Untouched(embedded.tokenizer.backend, embedded.tokenizer.cfg)
    captioner = Captioner(embedded.model, Processor(embedded.processor.cfg, tokenizer))
    with RunningServer(captioner) as server:
        error = server.post({"messages": user_message("a" * 2_000_000)}).json()["error"]
        assert error["code"] == "context_length_exceeded" and "2,000,0" in error["message"]
        assert server.post({"messages": user_message("a " * 400), "max_tokens": 1}).status_code == 200


def test_first_of_many_errors_is_enough(served):
    """Each error takes a kilobyte."""
    error = served.post({"messages": [{"role": "user", "content": [1] * 90_000}]}).json()["error"]
    assert error["param"].endswith(".0")
