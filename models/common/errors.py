"""The errors that a user's input, files or machine can cause.

Everything the project raises on purpose is a `NanoVLMError`, which the command line prints as one line. Any other
exception is a bug of ours and keeps its traceback.
"""

import sys

MAX_HALF = 300  # characters of a message, at its beginning and at its end


class NanoVLMError(Exception):
    """Base class; the message is one line that names the value, the limit and the way out; its middle may be cut.

    Of an option's value, field is the option's name and problem the rest: the message is field=problem.
    """

    def __init__(self, problem: object = "", *args: object, field: str | None = None):
        self.problem = shortened(str(problem))
        self.field = field
        super().__init__(f"{field}={self.problem}" if field else self.problem, *args)


def shortened(message: str) -> str:
    """A message as one line, cut in its middle if it is long."""
    text = " ".join(message.split()) if "\n" in message else message
    return text if len(text) <= 2 * MAX_HALF else f"{text[:MAX_HALF]} ... {text[-MAX_HALF:]}"


class InputError(NanoVLMError, ValueError):
    """An argument, prompt or setting that the model cannot use."""


class PromptTooLongError(InputError):
    """A prompt beyond the model's context."""


class CheckpointError(NanoVLMError, ValueError):
    """A model folder or Hub id that cannot be loaded."""


class FileError(NanoVLMError, OSError):
    """A file that cannot be read or written; errno as the system gave it, strerror without the name, or None."""

    def __init__(self, message: object = "", errno: int | None = None, strerror: str | None = None):
        super().__init__(message)
        self.errno = errno
        self.strerror = strerror

    def __str__(self) -> str:
        return str(self.args[0])


class BusyError(FileError):
    """A file or folder that another run writes."""


ALLOCATOR_ERRORS = ("can't allocate memory", "not enough memory", "out of memory")  # torch's on Linux, Windows, MPS


def is_out_of_memory(error: BaseException) -> bool:
    """True for an exception that means that main memory, or an accelerator's, is full."""
    torch = sys.modules.get("torch")  # torch raised nothing if nobody imported it
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ALLOCATOR_ERRORS)
