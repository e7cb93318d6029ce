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
from jinja2.exceptions import TemplateError, TemplateSyntaxError
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
        chat = (self._source, messages, add_generation_prompt)
        try:
            if self._is_known:
                return render(*chat)[0]
            new = LimitedProcess(f"{__name__}:render", RENDER_SECONDS, RENDER_BYTES)
            return str(self._processes.setdefault(os.getpid(), new).call(*chat)[0])
        except (LimitedError, OSError) as failure:
            raise CheckpointError(f"lm_chat_template cannot render this chat: {failure}") from None


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> Template:
    """A template in the sandbox."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox.from_string(source)


def render(source: str, messages: Messages, add_generation_prompt: bool) -> tuple[str, Sequence[bytes]]:
    """The text of a chat, and no bytes, as a limited process returns them; LimitedError says why there is none."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in compile_template(source).generate(messages=messages, add_generation_prompt=add_generation_prompt):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                raise TemplateError(f"its text has more than {MAX_TEXT:,} characters")
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it may be invalid, divide by zero, recurse ...
        kind = "not a valid jinja2 template: " if isinstance(error, SyntaxError | TemplateSyntaxError) else ""
        raise LimitedError(kind + first_line(error)[:200]) from None
    if not size:
        raise LimitedError("its text is empty")
    return "".join(pieces), ()


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Environment as transformers': nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
