"""How much a server accepts; each limit is a flag of `nanovlm serve`."""

from dataclasses import dataclass, field
from typing import Any

MiB = 2**20


def limit(default: float, metavar: str, help: str, minimum: int = 1) -> Any:
    return field(default=default, metadata={"metavar": metavar, "help": help, "minimum": minimum})


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int = limit(32, "N", "sequences decoded at once (default: 32)")
    max_pending: int = limit(
        64, "N", "sequences that may wait, --max-body each; clients of more get 429 (default: 64)", minimum=0
    )
    max_body_bytes: int = limit(20 * MiB, "BYTES", "size of a request, and of its remote images (default: 20 MiB)")
    image_cache_bytes: int = limit(
        128 * MiB,
        "BYTES",
        "memory for encoded images, which are not encoded again; 0 keeps none (default: 128 MiB)",
        minimum=0,
    )
    prefix_cache_bytes: int = limit(
        256 * MiB,
        "BYTES",
        "memory for keys and values of earlier chats, whose next turn computes only what is new; 0 keeps none "
        "(default: 256 MiB)",
        minimum=0,
    )
    max_pixels: int = limit(40_000_000, "N", "pixels of an image (default: 40,000,000)")
    timeout_s: float = limit(120.0, "S", "seconds for a request, waiting included (default: 120)")

    @staticmethod
    def flag(name: str) -> str:
        """The flag of a field: its name without the unit."""
        return "--" + name.removesuffix("_bytes").removesuffix("_s").replace("_", "-")
