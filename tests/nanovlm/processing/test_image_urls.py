"""Remote images: fetched from public addresses only, within limits of time and size."""

import asyncio
import contextlib
import gzip
import http.server
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest

from nanovlm import SAMPLE
from nanovlm.errors import ImageError
from nanovlm.processing.image_loading import is_url
from nanovlm.processing.image_urls import ImageFetcher, fetch_image, is_public
from nanovlm.serving.options import Limits
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


@contextlib.contextmanager
def run_site(context=None):
    """A web server on a free port; with a context it speaks TLS."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.requested, server.dripped = [], []
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def site():
    with run_site() as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        yield server


class LocalNames:
    """A resolver by which every name is at the given addresses; it records the names it was asked for."""

    def __init__(self, *addresses):
        self.addresses, self.names = list(addresses), []

    async def __call__(self, host, port):
        self.names.append(host)
        return self.addresses


def local_fetcher(**options):
    """A fetcher that takes local servers for public ones."""
    return ImageFetcher(allow_remote=True, is_public=lambda address: True, **options)


def fetch(url, *, max_bytes=10**6, **options):
    """What such a fetcher returns for a URL."""
    return asyncio.run(local_fetcher(**options).fetch(url, max_bytes))


def fetch_from_public(url, **options):
    """The same with the real rule about public addresses."""
    return asyncio.run(ImageFetcher(allow_remote=True, timeout_s=1, **options).fetch(url, 1000))


PUBLIC = """8.8.8.8 1.1.1.1 193.0.0.1 192.88.98.1 2606:4700:4700::1111 2001:4860:4860::8888 2a00:1450::1 3ffe::1"""
NOT_PUBLIC = """0.0.0.0 10.0.0.1 100.64.0.1 127.0.0.1 169.254.1.1 172.16.0.1 192.0.0.8 192.0.0.9 192.0.0.170 192.0.2.1
    192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 240.0.0.1 255.255.255.255
    :: ::1 ::8.8.8.8 ::ffff:8.8.8.8 ::ffff:0:8.8.8.8 64:ff9b::808:808 64:ff9b:1::1 100::1 5f00::1 fc00::1
    fe80::1 fe80::1%eth0 fec0::1 ff02::1 4000::1 2001::1 2001:2::1 2001:10::1 2001:20::1 2001:db8::1
    2002:808:808::1 3fff::1 2606:4700::5efe:a00:1 2606:4700::200:5efe:a00:1"""


def test_public_addresses_are_those_of_the_registries():
    assert [address for address in f"{PUBLIC} {NOT_PUBLIC}".split() if is_public(address)] == PUBLIC.split()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "[fe80::1%25lo]"])
def test_private_addresses_are_never_connected_to(host, no_connections):
    with pytest.raises(ImageError, match="private address|no such host|not a URL"):
        fetch_from_public(f"http://{host}/a.png")


def test_name_with_one_private_address_is_never_connected_to(no_connections):
    with pytest.raises(ImageError, match="'rebound.example' is at a private address"):
        fetch_from_public("http://rebound.example/", resolve=LocalNames("93.184.216.34", "127.0.0.1"))


@pytest.fixture
def no_connections(monkeypatch):
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, lambda *args: pytest.fail(f"connected to {args}"))


def test_connection_goes_to_the_address_that_was_checked(site):
    """A name that is resolved twice may lead elsewhere the second time."""
    names = LocalNames("127.0.0.1")
    data = fetch(f"http://name.example:{site.server_port}/sample.png?x=1", resolve=names)
    assert data == SAMPLE.read_bytes() and names.names == ["name.example"]


def test_proxies_of_the_environment_are_not_used(site, monkeypatch):
    """A proxy would resolve the name itself."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert fetch(f"{site.url}/sample.png?x=1") == SAMPLE.read_bytes()


def test_remote_images_are_answered_where_allowed(embedded, site):
    with RunningServer(embedded, fetcher=local_fetcher()) as server:
        found = server.post({"messages": user_message(QUESTIONS[0], f"{site.url}/sample.png?x=1")})
        assert answer_of(found) == embedded.caption(SAMPLE)
        for path, message in (("/none", "image 1: .* answers 404"), ("/moved", "image 1: .* has moved")):
            refused = server.post({"messages": user_message("?", site.url + path)})
            assert refused.status_code == 400 and re.search(message, refused.json()["error"]["message"])


def test_remote_images_share_the_size_limit_of_a_request(embedded, site):
    size = len(SAMPLE.read_bytes())
    with RunningServer(embedded, Limits(max_body=2 * size + 9), fetcher=local_fetcher()) as server:
        for n, status in ((2, 200), (3, 400)):
            messages = user_message("?", *[f"{site.url}/sample.png?x=1"] * n)
            response = server.post({"model": "nanovlm", "messages": messages, "max_tokens": 1})
            assert response.status_code == status
        assert "image 3: a remote image of more than 9 bytes" in response.json()["error"]["message"]


def test_http_urls_are_told_from_paths():
    assert is_url("http://a/b.png") and is_url("HTTPS://a/b.png")
    assert not any(map(is_url, ("a/http://b.png", "http.png", "ftp://a/b.png", b"http://a", None)))


def test_a_captioners_image_is_fetched_with_and_without_a_running_loop(site):
    async def in_a_loop():
        return fetch_image(url, local_fetcher())

    url = f"{site.url}/sample.png?x=1"
    assert fetch_image(url, local_fetcher()) == asyncio.run(in_a_loop()) == SAMPLE.read_bytes()
    with pytest.raises(ImageError, match="private address"):
        fetch_image(url)
    with pytest.raises(ImageError, match="answers 404"):
        fetch_image(f"{site.url}/none.png", local_fetcher())


def test_size_and_time_are_limited(site):
    with pytest.raises(ImageError, match="more than 100 bytes"):
        fetch(f"{site.url}/slow", max_bytes=100)
    for path in ("/slow", "/slow-head"):
        with pytest.raises(ImageError, match=r"it took more than 0\.5 s"):
            fetch(site.url + path, timeout_s=0.5)
    assert 0 < len(site.dripped) < 30
    assert len(fetch(f"{site.url}/packed", max_bytes=10**5)) < 10**5, "nothing is decompressed"


@pytest.mark.parametrize("url", ["http:///a.png", "http://user@127.0.0.1/", "http://127.0.0.1:x/", "http://a\udcff/"])
def test_broken_urls_are_refused(url):
    with pytest.raises(ImageError):
        fetch_from_public(url)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed one for name.example."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("certificate")
    names = ["-subj", "/CN=name.example", "-addext", "subjectAltName=DNS:name.example"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-keyout", folder / "key.pem"]
    command = ["openssl", "req", "-x509", "-days", "2", *names, *key, "-out", folder / "certificate.pem"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "certificate.pem"


@pytest.fixture
def tls_site(certificate, monkeypatch):
    """A site that speaks TLS; `fetch(path)` fetches from it as name.example."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with run_site(context) as server:

        def fetch_path(path, host="name.example"):
            return fetch(f"https://{host}:{server.server_port}{path}", resolve=LocalNames("127.0.0.1"))

        server.fetch = fetch_path
        yield server


@pytest.mark.full
def test_image_is_fetched_over_tls(tls_site):
    assert tls_site.fetch("/sample.png?x=1") == SAMPLE.read_bytes()


@pytest.mark.full
def test_server_with_a_wrong_certificate_is_sent_no_request(tls_site, monkeypatch):
    mismatch = r"^'https://other\.example:.*' cannot be trusted: Hostname mismatch, [^\n]*$"
    with pytest.raises(ImageError, match=mismatch):
        tls_site.fetch("/sample.png?x=1", host="other.example")
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(ImageError, match="^'https://name.example:.*' cannot be trusted: self-signed certificate$"):
        tls_site.fetch("/sample.png?x=1")
    assert tls_site.requested == []
