"""Options of `nanovlm serve`: where it listens, whom it serves and how much it accepts."""

import ipaddress
import re
from dataclasses import dataclass

from nanovlm.errors import UsageError
from nanovlm.options import check_settings, setting

MiB = 2**20
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Each field is a flag. InputError or UsageError for a value that is not possible."""

    host: str = setting(
        "127.0.0.1", "address of this machine to listen on; one that other machines can reach needs a key"
    )
    port: int = setting(8000, "port to listen on; 0 is any free one", maximum=65535)
    api_key: str | None = setting(
        None, "key that clients must send; ps does not show it in NANOVLM_API_KEY", metavar="KEY"
    )
    allow_host: tuple[str, ...] = setting(
        (), "further host name to serve, for example a proxy's", action="append", metavar="NAME"
    )
    allow_origin: tuple[str, ...] = setting(
        (), "origin whose pages may use the server from a browser, for example http://localhost:3000; 'null' is a "
        "page opened as a file, '*' is all",
        action="append", metavar="ORIGIN",
    )  # fmt: skip
    allow_remote: bool = setting(False, "fetch images from http(s) URLs of public addresses")
    max_num_seqs: int = setting(32, "sequences decoded at once", minimum=1)
    max_pending: int = setting(64, "requests that may wait, --max-body each; clients of more get 429")
    max_body: int = setting(
        20 * MiB, "size of a request, and of its remote images", minimum=1, metavar="BYTES", default_text="20 MiB"
    )
    image_cache: int = setting(
        128 * MiB, "memory for encoded images, which are not encoded again; 0 keeps none",
        metavar="BYTES", default_text="128 MiB",
    )  # fmt: skip
    prefix_cache: int = setting(
        256 * MiB, "memory for keys and values of earlier chats, which are not computed again; 0 keeps none",
        metavar="BYTES", default_text="256 MiB",
    )  # fmt: skip
    timeout: float = setting(120.0, "seconds for a request, waiting included", minimum=1, metavar="S")
    quiet: bool = setting(False, "write no line of log for each request")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("--api-key is empty, which would let everybody in; name a key, or omit it")
        if not is_loopback(self.host) and self.api_key is None:
            raise UsageError(
                f"--host {self.host} is reachable from other machines and needs a key; set --api-key or, hidden from "
                "ps, NANOVLM_API_KEY"
            )
        for origin in self.allow_origin:
            if origin not in ("*", "null") and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise UsageError(f"--allow-origin {origin!r} is no origin; give for example http://localhost:3000")

    @property
    def places(self) -> int:
        """Requests that run or wait at the same time."""
        return self.max_num_seqs + self.max_pending

    @property
    def hosts(self) -> set[str] | None:
        """Host names to serve; None is all of them, where the key protects a server that other machines reach."""
        if not is_loopback(self.host) and not self.allow_host:
            return None
        return {name.lower() for name in (*LOOPBACK_NAMES, self.host, *self.allow_host)}


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
