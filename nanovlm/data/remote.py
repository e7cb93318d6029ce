"""Files at addresses that fsspec opens: hf://, s3://, https:// and others."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from nanovlm.data.source import INSTALL_DATA
from nanovlm.errors import DataError, MissingExtraError, NanoVLMError, TrainingError

BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")  # {000..010}, as webdataset and shells write it
MAX_FILES = 1_000_000


def expand_braces(address: str) -> list[str]:
    """The addresses that shards-{000..010}.tar stands for, with as many digits as the first number has."""
    match = BRACES.search(address)
    if match is None:
        return [address]
    first, last = (int(number) for number in match.groups())
    if not first <= last < first + MAX_FILES:
        raise DataError(f"{address}: {match[0]} is no range of at most {MAX_FILES:,} numbers")
    names = (f"{number:0{len(match[1])}}" for number in range(first, last + 1))
    return [
        other for name in names for other in expand_braces(address[: match.start()] + name + address[match.end() :])
    ]


def list_files(address: str) -> list[str]:
    """The addresses of the files that a pattern with *, ? or {000..010} stands for; DataError if there are none."""
    import fsspec

    files: list[str] = []
    for one in expand_braces(address):
        if "*" in one or ("?" in one and urlsplit(one).scheme not in ("http", "https")):
            with open_errors(one):
                file_system, path = fsspec.core.url_to_fs(one)
                files += [file_system.unstrip_protocol(found) for found in sorted(file_system.glob(path))]
        else:
            files.append(one)
    if not files:
        raise DataError(f"{address}: there is no such file")
    return files


@contextmanager
def open_errors(address: str) -> Iterator[None]:
    """Turn whatever is raised while a remote file is found or downloaded into a DataError of one line."""
    try:
        yield
    except NanoVLMError:
        raise
    except ImportError as error:
        raise MissingExtraError(f"{address} cannot be read: {first_line(error)}; {INSTALL_DATA}") from None
    except Exception as error:  # the file systems raise errors of many kinds
        raise DataError(
            f"{address} cannot be read: {first_line(error)}; check the address and the connection"
        ) from None


@contextmanager
def stream_errors(path: str) -> Iterator[None]:
    """Turn whatever is raised while rows are streamed into a TrainingError that says how to resume."""
    try:
        yield
    except NanoVLMError:
        raise
    except Exception as error:  # of many kinds, from DNS to a broken file
        raise TrainingError(
            f"the stream of {path} broke off ({first_line(error)}); rerun the same command to resume from the last "
            "checkpoint"
        ) from None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
