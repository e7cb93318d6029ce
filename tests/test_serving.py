"""`nanovlm serve`, asked by the real openai client and, where that is too polite, over plain HTTP."""

import base64
import contextlib
import io
import threading
import time

import pytest
from PIL import Image

from nanovlm import SAMPLE, Captioner

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

import httpx  # noqa: E402  comes with openai
import uvicorn  # noqa: E402

from nanovlm.serving.app import make_app  # noqa: E402
from nanovlm.serving.desk import Desk, Limits  # noqa: E402


class Running:
    """A server of its own on a free port, in a thread."""

    def __init__(self, captioner, limits=None, *, hosts=None, api_key=None, allow_remote=False):
        self.desk = Desk(captioner, "nanovlm", limits or Limits(), allow_remote)
        app = make_app(self.desk, hosts, api_key)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none", http="h11"))
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        until(lambda: self.server.started)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *error):
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    def client(self, **options):
        options = {"api_key": "none", "max_retries": 0, "timeout": 60} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)


def until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def embedded():
    return Captioner.from_pretrained(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def served(embedded):
    with Running(embedded) as running:
        yield running


@pytest.fixture
def client(served):
    with served.client() as client:
        yield client


def data_url(picture, kind="png"):
    if isinstance(picture, Image.Image):
        picture.save(file := io.BytesIO(), kind)
        picture = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def asking(question, *pictures):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


SHOWN = data_url(SAMPLE.read_bytes())
QUESTIONS = ["Describe this picture.", "What colour is the ring?", "How many objects are there?", "Is there a star?"]


def test_an_answer_is_what_the_captioner_says(client, embedded):
    answer = client.chat.completions.create(model="nanovlm", messages=asking(QUESTIONS[0], SHOWN))
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (embedded.caption(SAMPLE), "stop")
    assert answer.usage.prompt_tokens == len(embedded.prepare(SAMPLE)[0])
    said = embedded.tokenizer.encode(choice.message.content)
    assert answer.usage.completion_tokens == len(said) + 1 and answer.model == "nanovlm"
