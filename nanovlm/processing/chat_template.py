"""Chat templates: jinja2 programs of a checkpoint, rendered in jinja2's sandbox, as in transformers.

The sandbox keeps a template from files and from Python's internals, but not from loops without end or texts that double
until memory is full, with the first chat or with a later one. So a template that is not known is rendered by a limited
process, which starts with the first chat and ends with this process.
"""

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanovlm.errors import CheckpointError, first_line
from nanovlm.processing.limited_process import LimitedError, LimitedProcess

MAX_SOURCE = 100_000  # characters of a template; the longest published ones have some 20,000
MAX_TEXT = 10_000_000  # characters of a rendered chat
RENDER_SECONDS = 3  # of CPU, for compiling a template and for each chat
RENDER_BYTES = 2**30  # of address space
# SHA-256 of templates that are rendered here: `models.config.CHATML`, which nanoVLM writes, and SmolVLM's.
KNOWN = {
    "fcf7a096fe99a48fd9ad2b250bf9237e96e8f48bffec1c7ea4d3f225176cd40e",
    "830005085ddd94cec605b6e21b885b28ffad6e3f82ee6a212c523533e8f04f01",
}

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A template that turns messages {'role', 'content'} into text. CheckpointError if its source is too long."""

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise CheckpointError(
                f"lm_chat_template has {len(source):,} characters, more than {MAX_SOURCE:,}; shorten it"
            )
        self._source = source
        self._is_known = hashlib.sha256(source.encode(errors="replace")).hexdigest() in KNOWN
        self._processes: dict[int, LimitedProcess] = {}  # by this process, which may be forked

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """The text of a chat. Thread-safe.

        CheckpointError if the template is not valid, fails, takes too long, or renders nothing or too much.
        """
        if self._is_known:
            return render(self._source, messages, add_generation_prompt)
        new = LimitedProcess(f"{__name__}:reply", RENDER_SECONDS, RENDER_BYTES)
        process = self._processes.setdefault(os.getpid(), new)
        try:
            (text, error), _ = process.call(self._source, messages, add_generation_prompt)
        except (LimitedError, OSError) as failure:
            raise CheckpointError(f"lm_chat_template cannot render this chat: {failure}") from None
        if error:
            raise CheckpointError(error)
        return text


def reply(*arguments: Any) -> tuple[tuple[str, str], Sequence[bytes]]:
    """The text of `render` and its error, one of them empty, and no bytes; for a limited process."""
    try:
        return (render(*arguments), ""), ()
    except CheckpointError as error:
        return ("", str(error)), ()


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> Template:
    """A template in the sandbox. CheckpointError if it is not valid."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return sandbox.from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # also RecursionError, and SyntaxError of the Python code that jinja2 compiles
        raise CheckpointError(f"lm_chat_template is not a valid jinja2 template: {first_line(error)[:200]}") from None


def render(source: str, messages: Messages, add_generation_prompt: bool) -> str:
    """The text of a chat. CheckpointError if the template is not valid, fails, or renders nothing or too much."""
    template = compile_template(source)
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(messages=messages, add_generation_prompt=add_generation_prompt):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                raise TemplateError(f"its text has more than {MAX_TEXT:,} characters")
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it may divide by zero, recurse ...
        raise CheckpointError(f"lm_chat_template cannot render this chat: {first_line(error)[:200]}") from None
    if not size:
        raise CheckpointError("lm_chat_template renders this chat as an empty text")
    return "".join(pieces)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Environment as transformers': nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
