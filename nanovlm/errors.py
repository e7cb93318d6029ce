"""The errors of `models.errors`, and those of images, data and the command line."""

from collections.abc import Iterator
from contextlib import contextmanager

from models.errors import BusyError as BusyError
from models.errors import CheckpointError as CheckpointError
from models.errors import FileError as FileError
from models.errors import InputError as InputError
from models.errors import NanoVLMError as NanoVLMError
from models.errors import PromptTooLongError as PromptTooLongError
from models.errors import is_out_of_memory as is_out_of_memory


class UsageError(NanoVLMError):
    """Wrong use of the command line, or of files it was given: exit code 2, before any work."""

    exit_code = 2


class SchemaError(InputError):
    """A JSON schema that answers cannot follow."""


class ImageError(NanoVLMError, ValueError):
    """An image file, URL or object that cannot be read."""


class OutputError(NanoVLMError, OSError):
    """A file that cannot be written, for example because the disk is full."""


class DataError(NanoVLMError, ValueError):
    """Training data that cannot be read or used."""

    exit_code = 2


class TrainingError(NanoVLMError, RuntimeError):
    """A training run that cannot start, or cannot continue."""


class MissingExtraError(NanoVLMError, ImportError):
    """An optional dependency is missing; the message names the extra to install."""

    exit_code = 2


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn the failure to import a package of an extra, inside the context, into a MissingExtraError."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("models", "nanovlm"):
            raise
        problem = f"{package} is missing" if package else first_line(error)  # an installed library may be broken
        raise MissingExtraError(f"{what}: {problem}; pip install 'nanovlm[{extra}]'") from None


def first_line(error: BaseException) -> str:
    """An error's message for a line of ours, without its period."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
