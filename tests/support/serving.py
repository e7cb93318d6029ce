"""A server in a thread, and what a client sends it."""

import base64
import io
import threading
import time

import httpx
import openai
import uvicorn
from PIL import Image

from nanovlm import SAMPLE
from nanovlm.serving.app import make_app
from nanovlm.serving.service import ChatService, Limits


class Running:
    """A server of its own on a free port, in a thread."""

    def __init__(self, captioner, limits=None, *, hosts=None, api_key=None, allow_remote=False):
        self.desk = ChatService(captioner, "nanovlm", limits or Limits(), allow_remote)
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

    def post(self, body, **options):
        return httpx.post(f"{self.url}/v1/chat/completions", **body_of(body), timeout=60, **options)

    def client(self, **options):
        options = {"api_key": "none", "max_retries": 0, "timeout": 60} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)


def body_of(body):
    return {"content": body} if isinstance(body, (bytes, str)) else {"json": body}


def until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
