"""The errors of `models.common.errors`, and those of images, data and the command line."""

from collections.abc import Iterator
from contextlib import contextmanager

from models.common.errors import BusyError as BusyError
from models.common.errors import CheckpointError as CheckpointError
from models.common.errors import FileError as FileError
from models.common.errors import InputError as InputError
from models.common.errors import NanoVLMError as NanoVLMError
from models.common.errors import PromptTooLongError as PromptTooLongError
from models.common.errors import is_out_of_memory as is_out_of_memory


class UsageError(NanoVLMError):
    """Wrong use of the command line, or of files it was given, noticed before any work."""


class SchemaError(InputError):
    """A JSON schema that answers cannot follow."""


class ImageError(NanoVLMError, ValueError):
    """An image file, URL or object that cannot be read."""


class OutputError(NanoVLMError, OSError):
    """A file that cannot be written, for example because the disk is full."""


class DataError(NanoVLMError, ValueError):
    """Training data that cannot be read or used."""


class TrainingError(NanoVLMError, RuntimeError):
    """A training run that cannot start, or cannot continue."""


class MissingExtraError(NanoVLMError, ImportError):
    """An optional dependency is missing; the message names the extra to install."""


WRONG_USE = (UsageError, InputError, CheckpointError, BusyError, DataError, MissingExtraError)


def exit_code(error: NanoVLMError) -> int:
    """The exit code of a command that ends with an error: 2 for wrong use, 1 for a failure."""
    return 2 if isinstance(error, WRONG_USE) else 1


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
