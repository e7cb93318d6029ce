"""Pictures that are named by an http(s) URL, for callers who allow it."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeGuard

from nanovlm.errors import MissingExtraError

if TYPE_CHECKING:
    from nanovlm.serving.image_urls import ImageFetcher

URL = re.compile(r"https?://", re.IGNORECASE)
MAX_BYTES = 64 * 2**20  # of a picture's file


def is_url(source: object) -> TypeGuard[str]:
    return isinstance(source, str) and URL.match(source) is not None


def fetch_picture(url: str, fetcher: "ImageFetcher | None" = None) -> bytes:
    """The file behind an http(s) URL, by the server's rules: public addresses only, no redirects, 10 s, MAX_BYTES.

    Raises ImageError if there is none, and MissingExtraError without the extra `serve`.
    """
    try:
        from nanovlm.serving.image_urls import ImageFetcher
    except ImportError:
        raise MissingExtraError(f"{url}: pictures are fetched by httpx: pip install 'nanovlm[serve]'") from None
    fetcher = fetcher or ImageFetcher(allow_remote=True)
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may run an event loop already, as Jupyter's does
        return thread.submit(asyncio.run, fetcher.fetch(url, MAX_BYTES)).result()
