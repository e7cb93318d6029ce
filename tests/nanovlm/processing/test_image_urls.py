"""Remote images: fetched from public addresses only, within limits of time and size."""

import asyncio
import contextlib
import gzip
import http.server
import re
import socket
import threading
import time

import pytest

from nanovlm import SAMPLE
from nanovlm.errors import ImageError
from nanovlm.processing import image_urls
from nanovlm.processing.image_urls import fetch, fetch_image, is_public
from support.serving import QUESTIONS, RunningServer, answer_of, user_message


class Site(http.server.BaseHTTPRequestHandler):
    """One image and some traps. Its server records the requested paths, and the bytes that were sent slowly."""

    def do_GET(self):
        self.server.requested.append(self.path)
        image = SAMPLE.read_bytes()
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/sample.png")
        else:
            found = ("/sample.png?x=1", "/slow", "/slow-head", "/packed")
            self.send_response(200 if self.path in found else 404)
        if self.path == "/slow-head":
            self.drip(b"X-Filler: x\r\n" * 60)
        if self.path == "/packed":
            self.send_header("Content-Encoding", "gzip")
            image = gzip.compress(bytes(10**7))
        self.end_headers()
        if self.path == "/slow":
            self.drip(image)
        else:
            with contextlib.suppress(OSError):
                self.wfile.write(image)

    def drip(self, data):
        self.flush_headers()
        with contextlib.suppress(OSError):
            for start in range(0, len(data), len(data) // 30):
                self.wfile.write(data[start : start + len(data) // 30])
                self.server.dripped.append(start)
                time.sleep(0.2)


@pytest.fixture
def site(monkeypatch):
    """A local server that is taken for a public one, also by the name of name.example."""
    monkeypatch.setattr(image_urls, "is_public", lambda address: True)
    resolve = socket.getaddrinfo

    def resolve_names(host, *args, **options):
        return resolve("127.0.0.1" if host == "name.example" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_names)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.requested, server.dripped = [], []
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        server.url = f"http://name.example:{server.server_port}"
        yield server
        server.shutdown()


PUBLIC = """8.8.8.8 1.1.1.1 193.0.0.1 192.88.98.1 2606:4700:4700::1111 2001:4860:4860::8888 2a00:1450::1 3ffe::1"""
NOT_PUBLIC = """0.0.0.0 10.0.0.1 100.64.0.1 127.0.0.1 169.254.1.1 172.16.0.1 192.0.0.8 192.0.0.9 192.0.0.170 192.0.2.1
    192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 240.0.0.1 255.255.255.255
    :: ::1 ::8.8.8.8 ::ffff:8.8.8.8 ::ffff:0:8.8.8.8 64:ff9b::808:808 64:ff9b:1::1 100::1 5f00::1 fc00::1
    fe80::1 fe80::1%eth0 fec0::1 ff02::1 4000::1 2001::1 2001:2::1 2001:10::1 2001:20::1 2001:db8::1
    2002:808:808::1 3fff::1"""


def test_public_addresses_are_those_of_the_registries():
    assert [address for address in f"{PUBLIC} {NOT_PUBLIC}".split() if is_public(address)] == PUBLIC.split()


REFUSED = [
    "http://127.0.0.1/a.png", "http://localhost/", "http://[::1]/", "http://2130706433/", "http://0x7f.1/",
    "/etc/passwd", "ftp://127.0.0.1/a.png",
    "http:///a.png", "http://user@127.0.0.1/", "http://127.0.0.1:x/", "http://a\udcff/", "http://no-host.invalid/",
]  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
def test_private_addresses_and_broken_urls_are_never_connected_to(url, monkeypatch):
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, lambda *args: pytest.fail(f"connected to {args}"))
    with pytest.raises(ImageError, match="at no public address|cannot be fetched"):
        asyncio.run(fetch(url, 1000))


def test_image_is_fetched_from_the_address_that_was_checked_and_not_by_a_proxy(site, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def in_a_loop():
        return fetch_image(url)

    url = f"{site.url}/sample.png?x=1"
    assert fetch_image(url) == asyncio.run(in_a_loop()) == SAMPLE.read_bytes()


def test_size_and_time_are_limited(site, monkeypatch):
    with pytest.raises(ImageError, match="more than 100 bytes"):
        asyncio.run(fetch(f"{site.url}/slow", 100))
    assert len(asyncio.run(fetch(f"{site.url}/packed", 10**5))) < 10**5, "nothing is decompressed"
    monkeypatch.setattr(image_urls, "TIMEOUT_S", 0.5)
    for path in ("/slow", "/slow-head"):
        with pytest.raises(ImageError, match=r"it took more than 0\.5 s"):
            asyncio.run(fetch(site.url + path, 10**6))


def test_server_fetches_where_allowed_and_images_share_its_size_limit(embedded, site):
    size = len(SAMPLE.read_bytes())
    with RunningServer(embedded, allow_remote=True, max_body=2 * size + 9) as server:
        for path, n, expected in (
            ("/sample.png?x=1", 1, None),
            ("/none", 1, ".* answers 404"),
            ("/moved", 1, ".* answers 302"),
            ("/sample.png?x=1", 3, ".* more than 9 bytes"),
        ):
            reply = server.post({"messages": user_message(QUESTIONS[0], *[site.url + path] * n)})
            if expected is None:
                assert answer_of(reply) == embedded.caption(SAMPLE)
            else:
                assert reply.status_code == 400 and re.search(expected, reply.json()["error"]["message"])
