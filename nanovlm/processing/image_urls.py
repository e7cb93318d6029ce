"""Images behind http(s) URLs of public addresses."""

import asyncio
import ipaddress
import socket
import ssl
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from nanovlm.errors import ImageError

MAX_BYTES = 64 * 2**20  # of an image that `fetch_image` reads
TIMEOUT_S = 10.0  # for the whole of an image
MAX_LOOKUPS = 256  # of host names, at the same time
UNICAST = ipaddress.ip_network("2000::/3")  # all public IPv6 addresses
SPECIAL = [  # IANA's registries know more blocks than Python: protocols, relays, examples and embedded IPv4 addresses
    ipaddress.ip_network(block)
    for block in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]
lookups = threading.BoundedSemaphore(MAX_LOOKUPS)


def is_public(address: str) -> bool:
    """Check whether an address is on the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if any(ip in block for block in SPECIAL) or ip.is_multicast:
        return False
    return ip in UNICAST if ip.version == 6 else ip.is_global


async def look_up(host: str, port: int) -> list[str]:
    """The addresses of a host name; OSError if there are none, ImageError if MAX_LOOKUPS are running.

    Each lookup has a thread of its own, as the system's call cannot be ended: those that take long hold up nobody.
    """
    found: Future[list[Any]] = Future()
    found.set_running_or_notify_cancel()  # so that who stops waiting does not cancel it, and it can end

    def run() -> None:
        try:
            try:
                addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            finally:
                lookups.release()
            found.set_result(addresses)
        except (OSError, UnicodeError) as error:
            found.set_exception(error if isinstance(error, OSError) else OSError(str(error)))

    if not lookups.acquire(blocking=False):
        raise ImageError(f"{host}: {MAX_LOOKUPS} lookups of host names are running; try again in a minute")
    threading.Thread(target=run, daemon=True, name="nanovlm-lookup").start()
    return [str(sockaddr[0]) for *_, sockaddr in await asyncio.wrap_future(found)]


async def fetch(url: str, max_bytes: int) -> bytes:
    """The file behind an http(s) URL; ImageError without one.

    The connection goes to the address that was checked, since a name that is resolved again could lead elsewhere.
    There are no redirects, and no proxies.
    """
    shown = repr(url[:60])
    try:
        async with asyncio.timeout(TIMEOUT_S):
            parsed = httpx.URL(url)
            port = parsed.port or (443 if parsed.scheme == "https" else 80)
            addresses = await look_up(parsed.host, port)
            if not all(map(is_public, addresses)):
                raise ImageError(f"{shown} is at no public address; images are fetched from those only")
            target = parsed.copy_with(host=addresses[0])
            headers = {"Host": parsed.netloc.decode(), "Accept-Encoding": "identity"}
            tls_name = {"sni_hostname": parsed.host}
            async with (
                httpx.AsyncClient(verify=ssl.create_default_context(), timeout=TIMEOUT_S, trust_env=False) as client,
                client.stream("GET", target, headers=headers, extensions=tls_name) as response,
            ):
                if response.status_code != 200:
                    raise ImageError(f"{shown} cannot be fetched: its server answers {response.status_code}")
                data = bytearray()
                async for chunk in response.aiter_raw():  # never unpacked: few bytes could become many
                    data += chunk
                    if len(data) > max_bytes:
                        raise ImageError(f"{shown} has more than {max_bytes:,} bytes")
                return bytes(data)
    except TimeoutError:
        raise ImageError(f"{shown} cannot be fetched: it took more than {TIMEOUT_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
        raise ImageError(f"{shown} cannot be fetched: {str(error) or type(error).__name__}") from None


def fetch_image(url: str) -> bytes:
    """Fetch for callers without an event loop of their own, or inside one, as Jupyter's."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, fetch(url, MAX_BYTES)).result()
