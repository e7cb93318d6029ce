"""Pictures that come as URLs: data URLs, and remote ones where they are allowed, but never from a private address."""

import base64
import binascii
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from urllib.parse import SplitResult, urlsplit

from nanovlm.errors import ImageError

SECONDS = 10  # a remote picture may take
PIECE = 65_536


def picture_bytes(url: str, allow_remote: bool, max_bytes: int) -> bytes:
    """The file that a URL holds or names; PictureError says why it can not be had."""
    scheme = url[:5].lower()
    if scheme == "data:":
        return from_data(url)
    if scheme not in ("http:", "https"):
        raise ImageError(f"{url[:60]!r} is no picture's URL; send data:image/png;base64,...")
    if not allow_remote:
        raise ImageError(
            f"{url[:60]!r} is remote, and this server fetches nothing; send data:image/png;base64,... or start it with "
            "--allow-remote"
        )
    return from_afar(url, max_bytes)


def from_data(url: str) -> bytes:
    """data:image/png;base64,... as in RFC 2397; what kind of picture it is, its bytes say."""
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError("a data URL without base64; send data:image/png;base64,...")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"a data URL whose base64 is broken: {error}") from None


def from_afar(url: str, max_bytes: int) -> bytes:
    """Fetch a file from a public address; the connection goes to the address that was checked, not to its name."""
    name, deadline = url[:60], time.monotonic() + SECONDS
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ImageError(f"{name!r} is no URL: {error}") from None
    if not parts.hostname or parts.username is not None:
        raise ImageError(f"{name!r} must name a host, and no user")
    try:
        address = public_address(parts.hostname, port)
        return _get(parts, address, port, max_bytes, deadline)
    except ImageError:
        raise
    except ssl.SSLCertVerificationError as error:
        raise ImageError(f"{name!r} cannot be trusted: {error.verify_message.rstrip('.')}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        late = f"it took more than {SECONDS} s" if time.monotonic() > deadline else ""
        raise ImageError(f"{name!r} cannot be fetched: {late or str(error) or type(error).__name__}") from None


def public_address(host: str, port: int) -> str:
    """An address of a host all of whose addresses are public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ImageError(f"no such host: {host!r}") from None
    addresses = [sockaddr[0] for *_, sockaddr in found]
    for address in addresses:
        if not is_public(address):
            raise ImageError(f"{host!r} is at a private address; pictures are fetched from public ones only")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is on the open internet; one that wraps another (NAT64, 6to4, Teredo) counts as private."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 6 and (ip.ipv4_mapped or ip.sixtofour or ip.teredo or ip in ipaddress.ip_network("64:ff9b::/96")):
        return False
    return ip.is_global and not ip.is_multicast


def _get(parts: SplitResult, address: str, port: int, max_bytes: int, deadline: float) -> bytes:
    """The body of a GET, of at most max_bytes; nothing but 200 will do, a redirect least of all."""
    lines = [socket.create_connection((address, port), SECONDS)]  # and the same one, once it is encrypted
    timer = threading.Timer(deadline - time.monotonic(), _hang_up, [lines])  # SECONDS is for each of a socket's words
    timer.start()
    connection = http.client.HTTPConnection(parts.hostname, port)
    try:
        if parts.scheme == "https":
            context = ssl.create_default_context()
            lines.append(context.wrap_socket(lines[0], server_hostname=parts.hostname))
        connection.sock = lines[-1]  # not connect(), which looks the name up again
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"User-Agent": "nanovlm", "Accept": "image/*"})
        with connection.getresponse() as response:
            data = _read(response, max_bytes)
    finally:
        timer.cancel()
        for line in lines:
            line.close()
    if time.monotonic() > deadline:
        raise TimeoutError("hung up before its end")
    return data


def _read(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    if response.status // 100 == 3:
        raise ImageError("a remote picture that has moved; name the place where it is")
    if response.status != 200:
        raise ImageError(f"a remote picture whose server says {response.status}")
    data = bytearray()
    while piece := response.read1(PIECE):
        data += piece
        if len(data) > max_bytes:
            raise ImageError(f"a remote picture of more than {max_bytes:,} bytes; scale it down first")
    return bytes(data)


def _hang_up(lines: list[socket.socket]) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        lines[-1].shutdown(socket.SHUT_RDWR)
