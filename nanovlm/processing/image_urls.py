"""The files that image URLs hold or name: data URLs and, where allowed, http(s) URLs of public addresses."""

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import httpx

from nanovlm.errors import ImageError

MAX_BYTES = 64 * 2**20  # of an image file that `fetch_image` reads
FETCH_TIMEOUT_S = 10.0  # for the whole of a remote image
MAX_SHOWN_URL = 60  # characters of a URL in an error
MIN_BASE64 = 64  # characters; what is shorter holds no image, and may be a path
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")

GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all that IANA has assigned to the public IPv6 internet
ISATAP = 0x5EFE  # bits 64 to 95 of an address that embeds an IPv4 address; a flag of it is left out (RFC 5214)
SPECIAL_BLOCKS = [  # IANA's special-purpose registries, where Python's is_global may know less
    *map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24")),  # protocol assignments, 6to4 relays
    *map(ipaddress.ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")),  # Teredo ..., examples, 6to4
]

Resolver = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """All IP addresses of a host."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ImageError(f"no such host: {host!r}") from None
    return [str(sockaddr[0]) for *_, sockaddr in found]


def is_public(address: str) -> bool:
    """Whether an address is on the public internet; one that embeds another (6to4, Teredo, ISATAP) is not."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if any(ip in block for block in SPECIAL_BLOCKS if block.version == ip.version):
        return False
    if ip.version == 6:
        return ip in GLOBAL_UNICAST and int(ip) >> 32 & ~(2 << 24) & 0xFFFFFFFF != ISATAP
    return ip.is_global and not ip.is_multicast


class PublicTransport(httpx.AsyncHTTPTransport):
    """Connects to a public IP address only, and to the very address that was checked.

    A host name that is resolved again could lead elsewhere (DNS rebinding). The name stays in the Host header and in
    TLS, whose certificate is verified against it.
    """

    def __init__(self, ssl_context: ssl.SSLContext, resolve: Resolver, is_public: Callable[[str], bool]):
        super().__init__(verify=ssl_context, trust_env=False)
        self.resolve, self.is_public = resolve, is_public

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.raw_host.decode("ascii")
        port = request.url.port or {"http": 80, "https": 443}[request.url.scheme]
        addresses = await self.resolve(host, port)
        if not all(map(self.is_public, addresses)):
            raise ImageError(f"{host!r} is at a private address; images are fetched from public ones only")
        request.extensions["sni_hostname"] = host
        request.url = request.url.copy_with(host=addresses[0])
        return await super().handle_async_request(request)


class ImageFetcher:
    """Fetches remote images.

    resolve and is_public replace the look-up of host names and the rule about their addresses.
    """

    def __init__(
        self,
        *,
        allow_remote: bool = False,
        timeout_s: float = FETCH_TIMEOUT_S,
        resolve: Resolver = resolve,
        is_public: Callable[[str], bool] = is_public,
    ):
        self.allow_remote, self.timeout_s, self.resolve, self.is_public = allow_remote, timeout_s, resolve, is_public

    @cached_property
    def ssl_context(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """The file behind an http(s) URL; ImageError says why there is none."""
        shown = repr(url[:MAX_SHOWN_URL])
        if url[:5].lower() not in ("http:", "https"):
            raise ImageError(f"{shown} is not an image URL; send data:image/png;base64,...")
        if not self.allow_remote:
            raise ImageError(
                f"{shown} is remote, and this server fetches no images; send data:image/png;base64,... or start it "
                "with --allow-remote"
            )
        try:
            async with asyncio.timeout(self.timeout_s) as timeout:
                return await self._get(url, max_bytes)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise ImageError(f"{shown} cannot be fetched: it took more than {self.timeout_s:g} s") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise ImageError(f"{shown} is not a URL: {error}") from None
        except httpx.HTTPError as error:
            if certificate_error := find_certificate_error(error):
                reason = certificate_error.verify_message.rstrip(".")
                raise ImageError(f"{shown} cannot be trusted: {reason}") from None
            raise ImageError(f"{shown} cannot be fetched: {error or type(error).__name__}") from None

    async def _get(self, address: str, max_bytes: int) -> bytes:
        url = httpx.URL(address)
        if not url.host or url.userinfo:
            raise ImageError(f"{address[:MAX_SHOWN_URL]!r} must name a host, and no user")
        headers = {"User-Agent": "nanovlm", "Accept": "image/*", "Accept-Encoding": "identity"}
        transport = PublicTransport(self.ssl_context, self.resolve, self.is_public)
        async with (
            httpx.AsyncClient(transport=transport, timeout=self.timeout_s, trust_env=False) as client,
            client.stream("GET", url, headers=headers, follow_redirects=False) as response,
        ):
            if response.is_redirect or response.status_code // 100 == 3:
                raise ImageError("a remote image that has moved; send the URL it has moved to")
            if response.status_code != 200:
                raise ImageError(f"a remote image whose server answers {response.status_code}")
            data = bytearray()
            async for chunk in response.aiter_raw():  # never unpacked: few bytes could become many
                data += chunk
                if len(data) > max_bytes:
                    limit = f"{max_bytes:,} bytes; the images of a request share its size limit"
                    raise ImageError(f"a remote image of more than {limit}")
            return bytes(data)


def is_data_url(url: str) -> bool:
    """Whether a URL holds the image itself: as a data URL, or as base64 alone, which some clients send."""
    is_base64 = len(url) >= MIN_BASE64 and BASE64.fullmatch(url[:MAX_SHOWN_URL]) is not None  # the rest would take long
    return url[:5].lower() == "data:" or is_base64


def decode_data_url(url: str) -> bytes:
    """The bytes of data:image/png;base64,... (RFC 2397) or of base64 alone; their content tells the image format."""
    head, comma, data = url.partition(",") if url[:5].lower() == "data:" else ("data:;base64", ",", url)
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError("a data URL without base64; send data:image/png;base64,...")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"a data URL with invalid base64: {error}") from None


def find_certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """The certificate error that caused an error of httpx, if any."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def fetch_image(url: str, fetcher: ImageFetcher | None = None) -> bytes:
    """The file behind an http(s) URL: public addresses only, no redirects, 10 s, MAX_BYTES. ImageError if none."""
    fetcher = fetcher or ImageFetcher(allow_remote=True)
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may run an event loop already, as Jupyter's does
        return thread.submit(asyncio.run, fetcher.fetch(url, MAX_BYTES)).result()
