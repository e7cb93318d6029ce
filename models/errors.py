"""The errors that a user's input, files or machine can cause.

Everything the project raises on purpose is a `NanoVLMError`: the command line prints it as one line and exits with
`exit_code`. Any other exception is a bug of ours and keeps its traceback.
"""

import sys


class NanoVLMError(Exception):
    """Base class; the message is one line that names the value, the limit and the way out."""

    exit_code = 1


class InputError(NanoVLMError, ValueError):
    """An argument, prompt or setting that the model cannot use."""


class CheckpointError(NanoVLMError, ValueError):
    """A model folder or Hub id that cannot be loaded."""

    exit_code = 2


class CompileError(NanoVLMError, RuntimeError):
    """The decode step could not be compiled on this machine."""

    exit_code = 2


ALLOCATOR_ERRORS = ("can't allocate memory", "not enough memory", "out of memory")  # torch's on Linux, Windows, MPS


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that main memory, or an accelerator's, is full."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")  # torch raised nothing if nobody imported it
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ALLOCATOR_ERRORS)
