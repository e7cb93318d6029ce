"""The errors that a user's input, files or machine can cause.

Everything the project raises on purpose is a `NanoVLMError`: the command line prints it as one line and exits with
`exit_code`. Any other exception is a bug of ours and keeps its traceback.
"""


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
