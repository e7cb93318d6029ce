"""Chat templates: jinja2 programs of a checkpoint, rendered in jinja2's sandbox, as in transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanovlm.errors import CheckpointError, first_line

MAX_SOURCE = 100_000  # characters of a template; the longest published ones have some 20,000
MAX_TEXT = 10_000_000  # characters of a rendered chat


class ChatTemplate:
    """A template that turns messages {'role', 'content'} into text. CheckpointError if its source is not valid."""

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise CheckpointError(
                f"lm_chat_template has {len(source):,} characters, more than {MAX_SOURCE:,}; shorten it"
            )
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        sandbox.filters["tojson"] = _tojson
        sandbox.globals["raise_exception"] = _raise_exception
        sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = sandbox.from_string(source)
        except Exception as error:  # also RecursionError, and SyntaxError of the Python code that jinja2 compiles
            raise CheckpointError(
                f"lm_chat_template is not a valid jinja2 template: {first_line(error)[:200]}"
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The text of a chat. Thread-safe. CheckpointError if the template fails, or renders nothing or too much."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(messages=messages, add_generation_prompt=add_generation_prompt):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_TEXT:
                    raise TemplateError(f"its text has more than {MAX_TEXT:,} characters")
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
