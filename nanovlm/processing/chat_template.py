"""Chat templates: jinja2 programs of a checkpoint, rendered in jinja2's sandbox, as in transformers.

The sandbox keeps a template from files and from Python's internals, but not from loops without end or texts that double
until memory is full. So a template that is not known is compiled and rendered by a process of its own with limits on
both, which starts with the first chat and ends with this process.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanovlm.errors import CheckpointError, first_line

MAX_SOURCE = 100_000  # characters of a template; the longest published ones have some 20,000
MAX_TEXT = 10_000_000  # characters of a rendered chat
RENDER_SECONDS = 3  # of CPU, for compiling a template and for each chat
RENDER_BYTES = 2**30  # of address space
# SHA-256 of templates that are rendered here: `models.config.CHATML`, which nanoVLM writes, and SmolVLM's.
KNOWN = {
    "fcf7a096fe99a48fd9ad2b250bf9237e96e8f48bffec1c7ea4d3f225176cd40e",
    "830005085ddd94cec605b6e21b885b28ffad6e3f82ee6a212c523533e8f04f01",
}
ROOT = str(Path(__file__).parents[2])
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from {__name__} import main; main()"

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
        self._processes: dict[int, _Process] = {}  # by this process, which may be forked

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """The text of a chat. Thread-safe.

        CheckpointError if the template is not valid, fails, takes too long, or renders nothing or too much.
        """
        if self._is_known:
            return render(self._template, messages, add_generation_prompt)
        process = self._processes.setdefault(os.getpid(), _Process(self._source))
        return process.render(messages, add_generation_prompt)

    @cached_property
    def _template(self) -> Template:
        return compile_template(self._source)


class _Process:
    """The other end of `main`, started again if a chat has ended it."""

    def __init__(self, source: str):
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        with self._lock:
            if self._process is None:
                self._process = self._start()
            reply: dict[str, str] = {}
            with suppress(OSError, ValueError):  # it has ended
                self._send([messages, add_generation_prompt])
                assert self._process.stdout is not None  # a pipe
                reply = json.loads(self._process.stdout.readline())
            if not reply:
                _end(self._process)
                self._process = None
        if "text" in reply:
            return reply["text"]
        too_much = f"it takes more than {RENDER_SECONDS} s or {RENDER_BYTES >> 20} MiB"
        raise CheckpointError(reply.get("error") or f"lm_chat_template cannot render this chat: {too_much}")

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, encoding="utf-8", bufsize=-1,
        )  # fmt: skip
        weakref.finalize(self, _end, self._process)
        with suppress(OSError):
            self._send(self._source)
        return self._process

    def _send(self, value: Any) -> None:
        assert self._process is not None and self._process.stdin is not None  # a pipe
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # bytes for a process that has ended
            pipe.close() if pipe is not None else None
    process.kill()
    process.wait()


def main() -> None:
    """Read a template, then chats; write the text of each, or why there is none. JSON, a line each."""
    limit(RENDER_SECONDS)
    source = json.loads(sys.stdin.readline())
    template = None
    for line in sys.stdin:
        limit(RENDER_SECONDS)
        try:
            template = compile_template(source) if template is None else template
            reply = {"text": render(template, *json.loads(line))}
        except CheckpointError as error:
            reply = {"error": str(error)}
        except MemoryError:
            return
        print(json.dumps(reply), flush=True)


def limit(seconds: int) -> None:
    """End this process if it takes more CPU time than that from now on; memory has a limit, too."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (RENDER_BYTES, RENDER_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, resource.RLIM_INFINITY))


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


def render(template: Template, messages: Messages, add_generation_prompt: bool) -> str:
    """The text of a chat. CheckpointError if the template fails, or renders nothing or too much."""
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
