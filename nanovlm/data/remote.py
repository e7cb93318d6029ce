"""Files at addresses that fsspec opens: hf://, s3://, https:// and others."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from nanovlm.errors import DataError, MissingExtraError, NanoVLMError, TrainingError

INSTALL_DATA = "pip install 'nanovlm[data]'"
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")  # {000..010}, as webdataset and shells write it
MAX_FILES = 1_000_000


def expand_braces(address: str) -> list[str]:
    """The addresses that shards-{000..010}.tar stands for, with as many digits as the first number has."""
    match = BRACES.search(address)
    if match is None:
        return [address]
    first, last = map(int, match.groups())
    if not first <= last < first + MAX_FILES:
        raise DataError(f"{address}: {match[0]} is no range of at most {MAX_FILES:,} numbers")
    rests = expand_braces(address[match.end() :])
    return [f"{address[: match.start()]}{n:0{len(match[1])}}{rest}" for n in range(first, last + 1) for rest in rests]


def list_files(address: str) -> list[str]:
    """The addresses of the files that a pattern with *, ? or {000..010} stands for; DataError if there are none."""
    import fsspec

    files: list[str] = []
    for one in expand_braces(address):
        if "*" in one or ("?" in one and urlsplit(one).scheme not in ("http", "https")):
            with remote_errors(one):
                file_system, path = fsspec.core.url_to_fs(one)
                files += [file_system.unstrip_protocol(found) for found in sorted(file_system.glob(path))]
        else:
            files.append(one)
    if not files:
        raise DataError(f"{address}: there is no such file; correct the address")
    return files


@contextmanager
def remote_errors(address: str, streaming: bool = False) -> Iterator[None]:
    """Turn whatever is raised into one line: a DataError or, while rows are streamed, a TrainingError."""
    try:
        yield
    except NanoVLMError:
        raise
    except Exception as error:  # of many kinds, from DNS to a broken file
        reason = first_line(error)
        if streaming:
            remedy = "rerun the same command to resume from the last checkpoint"
            raise TrainingError(f"the stream of {address} broke off ({reason}); {remedy}") from None
        if isinstance(error, ImportError):
            raise MissingExtraError(f"{address} cannot be read: {reason}; {INSTALL_DATA}") from None
        raise DataError(f"{address} cannot be read: {reason}; check the address and the connection") from None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
