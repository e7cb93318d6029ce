"""Images named by a URL: fetched by the server's rules, also where an event loop runs."""

import asyncio
import http.server
import threading

import pytest

from nanovlm import SAMPLE
from nanovlm.errors import ImageError
from nanovlm.processing.image_loading import is_url
from nanovlm.processing.image_urls import ImageFetcher, fetch_image


@pytest.fixture(scope="module")
def site():
    """The URL of a local server with /sample.png."""

    class Site(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=SAMPLE.parent)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown(), server.server_close(), thread.join()


def local():
    """A fetcher that takes the local server for a public one."""
    return ImageFetcher(allow_remote=True, is_public=lambda address: True)


def test_http_urls_are_told_from_paths():
    assert is_url("http://a/b.png") and is_url("HTTPS://a/b.png")
    assert not any(map(is_url, ("a/http://b.png", "http.png", "ftp://a/b.png", b"http://a", None)))


def test_an_image_is_fetched_with_and_without_a_running_loop(site):
    async def in_a_loop():
        return fetch_image(f"{site}/sample.png", local())

    assert fetch_image(f"{site}/sample.png", local()) == asyncio.run(in_a_loop()) == SAMPLE.read_bytes()


def test_private_addresses_and_missing_images_are_refused(site):
    with pytest.raises(ImageError, match="private address"):
        fetch_image(f"{site}/sample.png")
    with pytest.raises(ImageError, match="answers 404"):
        fetch_image(f"{site}/none.png", local())
