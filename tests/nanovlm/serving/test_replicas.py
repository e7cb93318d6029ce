"""Two servers behind a load balancer: nginx with the documented configuration."""

import os
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from nanovlm import SAMPLE
from support import ROOT
from support.serving import QUESTIONS, SAMPLE_URL, PlainClient, answer_of, http, until, user_message

pytestmark = pytest.mark.full


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def is_healthy(port):
    try:
        return http.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def replicas():
    """The ports and processes of two servers, started by the command line."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "nanovlm", "serve", "--device", "cpu", "--dtype", "float32", "--port"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, str(port)], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) for port in ports
    ]
    try:
        for port in ports:
            until(lambda port=port: is_healthy(port), seconds=120)
        yield dict(zip(ports, processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def documented_nginx(ports, tmp_path):
    """nginx with the configuration that docs/serving.md shows, but for the ports."""
    (block,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs/serving.md").read_text(encoding="utf-8"), re.DOTALL)
    port = free_port()
    for documented, actual in zip((8001, 8002, 8000), (*ports, port)):
        assert f"127.0.0.1:{documented}" in block
        block = block.replace(f"127.0.0.1:{documented}", f"127.0.0.1:{actual}")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in kinds)
    log = f"log_format replica $upstream_addr;\naccess_log {tmp_path}/access.log replica;\n"
    user = "user root;\n" if os.geteuid() == 0 else ""  # who may write below tmp_path
    settings = f"{user}daemon off;\npid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\nevents {{}}\n"
    (tmp_path / "nginx.conf").write_text(f"{settings}http {{\n{log}{paths}{block}}}\n")
    process = subprocess.Popen(["nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf", "-e", tmp_path / "error.log"])
    try:
        until(lambda: is_healthy(port))
        yield port
    finally:
        process.terminate()
        process.wait()


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_replicas_share_the_requests_and_none_is_lost_when_one_is_killed(replicas, embedded, tmp_path):
    expected = {question: embedded.caption(SAMPLE, question, max_new_tokens=256) for question in QUESTIONS}

    def ask(question):
        body = {"model": "nanovlm", "messages": user_message(question, SAMPLE_URL)}
        return answer_of(http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body))

    with documented_nginx(list(replicas), tmp_path) as port, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, QUESTIONS * 2)) == [expected[question] for question in QUESTIONS * 2]
        answered = (tmp_path / "access.log").read_text()
        assert all(f"127.0.0.1:{replica}" in answered for replica in replicas)
        client = PlainClient(f"http://127.0.0.1:{port}")
        messages = user_message(QUESTIONS[0], SAMPLE_URL)
        chunks = list(client.chat.completions.create(model="nanovlm", messages=messages, stream=True))
        assert len(chunks) > 2
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected[QUESTIONS[0]]
        asked = [pool.submit(ask, question) for question in QUESTIONS * 4]
        next(iter(replicas.values())).kill()
        assert [future.result() for future in asked] == [expected[question] for question in QUESTIONS * 4]
