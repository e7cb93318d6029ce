"""A server in a thread, and what a client sends it."""

import base64
import contextlib
import io
import json
import threading
import time
from copy import copy

import httpx
from PIL import Image

from nanovlm import SAMPLE
from nanovlm.serving.app import make_app
from nanovlm.serving.options import ServeOptions
from nanovlm.serving.web import Server

# One for all tests: each new client would read all certificates. It keeps no connection: ports change their servers.
http = httpx.Client(timeout=60, verify=False, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def watch(captioner, before_step=lambda: None):
    """The captioner with batches that count their steps, and call before_step() before each."""

    def make_batch(batch_size, **caches):
        batch = captioner.batch(batch_size, **caches)
        step, batch.n_steps = batch.step, 0

        def watched():
            before_step()
            batch.n_steps += 1
            return step()

        batch.step = watched
        return batch

    watched = copy(captioner)
    watched.batch = make_batch
    return watched


@contextlib.contextmanager
def running(server):
    """The address of a server that runs in a thread."""
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


class RunningServer:
    """A server of its own on a free port, in a thread; before_step is that of `watch`, options of ServeOptions."""

    def __init__(self, captioner, *, before_step=lambda: None, **options):
        options = ServeOptions(**{"image_cache": 0, "prefix_cache": 0, "quiet": True} | options)
        app = make_app(watch(captioner, before_step), "nanovlm", options)
        self.chats, self.running = app.state.chats, contextlib.ExitStack()
        self.server = Server(app)

    def __enter__(self):
        self.url = self.running.enter_context(running(self.server))
        return self

    def __exit__(self, *error):
        self.running.close()

    @property
    def batch(self):
        return self.chats.engine.batch

    @property
    def idle(self):
        return len(self.chats.active) == self.batch.running == self.batch.waiting == 0

    def post(self, body, path="/v1/chat/completions", **options):
        body = {"content": body} if isinstance(body, (bytes, str)) else {"json": body}
        return http.post(self.url + path, **body, **options)

    def client(self):
        return PlainClient(self.url)

    def openai_client(self):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


class Record(dict):
    """A JSON object whose fields are attributes, None if it has no such field."""

    __getattr__ = dict.get


class PlainClient:
    """The openai client's method over plain HTTP: nothing is repaired on the way."""

    def __init__(self, url):
        self.url = f"{url}/v1/chat/completions"
        self.chat = Record(completions=Record(create=self.create))

    def create(self, extra_body=(), **body):
        body |= dict(extra_body)
        if body.get("stream"):
            return stream_events(self.url, body)
        response = http.post(self.url, json=body)
        assert response.status_code == 200, response.text
        return json.loads(response.text, object_hook=Record)


def stream_events(url, body):
    with http.stream("POST", url, json=body) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "), object_hook=Record)


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def data_url(image, kind="png"):
    if isinstance(image, Image.Image):
        image.save(file := io.BytesIO(), kind)
        image = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def user_message(question, *urls):
    """Messages of one user turn that shows images and asks a question."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def chat(client, messages=None, **options):
    """A chat completion of a client, about the sample image without messages."""
    messages = user_message(QUESTIONS[0], SAMPLE_URL) if messages is None else messages
    return client.chat.completions.create(model="nanovlm", messages=messages, **options)


def answer_of(response):
    return response.json()["choices"][0]["message"]["content"]


SAMPLE_URL = data_url(SAMPLE.read_bytes())

QUESTIONS = ["Describe this picture.", "What colour is the ring?", "How many objects are there?", "Is there a star?"]
