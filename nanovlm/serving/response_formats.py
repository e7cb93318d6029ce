"""What clients get: OpenAI's chat completions, completions and responses, whole or as the events of a stream."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from models.inference.continuous_batching import TokenLogprobs
from nanovlm.serving.errors import APIError

LEAST_LOGPROB = -9999.0
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class TextDelta:
    """New text of a sequence, and its tokens with their log-probabilities if the request asked for them."""

    text: str = ""
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()

    def __add__(self, other: "TextDelta") -> "TextDelta":
        return TextDelta(self.text + other.text, self.logprobs + other.logprobs)


@dataclass(frozen=True)
class Usage:
    """Prompt tokens, image tokens included, counted once for all n; and generated tokens, end tokens included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt

    def as_dict(self, prompt: str = "prompt_tokens", completion: str = "completion_tokens") -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        cached = {f"{prompt}_details": {"cached_tokens": self.cached_tokens}}
        return {prompt: self.prompt_tokens, completion: self.completion_tokens, "total_tokens": total} | cached


class OutputFormat(Protocol):
    """How one kind of request is answered."""

    def response(self, answers: Sequence[TextDelta], finish_reasons: Sequence[str | None], usage: Usage) -> dict: ...

    def start(self, n: int) -> Iterator[str]:
        """The first events of a stream of n answers."""
        ...

    def delta(self, index: int, new: TextDelta, finish_reason: str | None) -> Iterator[str]:
        """The events for new text of an answer, or for its end."""
        ...

    def end(self, usage: Usage, include_usage: bool) -> Iterator[str]:
        """The last events."""
        ...

    def error(self, error: APIError) -> str:
        """The last event of a stream that failed."""
        ...


def format_event(data: dict[str, Any], name: str | None = None) -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


DONE = "data: [DONE]\n\n"


class ChatFormat:
    """Chat completions; all chunks of a stream share an id, the model's name and the time of creation."""

    def __init__(self, request_id: str, model: str, decode: Decode):
        self.base = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
        self.decode = decode

    def response(self, answers: Sequence[TextDelta], finish_reasons: Sequence[str | None], usage: Usage) -> dict:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "finish_reason": finish_reason,
                "logprobs": self._logprobs(answer),
            }
            for index, (answer, finish_reason) in enumerate(zip(answers, finish_reasons))
        ]
        return self.base | {"object": "chat.completion", "choices": choices, "usage": usage.as_dict()}

    def start(self, n: int) -> Iterator[str]:
        for index in range(n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, new: TextDelta, finish_reason: str | None) -> Iterator[str]:
        if new.text or new.logprobs:
            yield self._chunk(index, {"content": new.text}, logprobs=self._logprobs(new))
        if finish_reason:
            yield self._chunk(index, {}, finish_reason)

    def end(self, usage: Usage, include_usage: bool) -> Iterator[str]:
        if include_usage:
            chunk = {"object": "chat.completion.chunk", "choices": [], "usage": usage.as_dict()}
            yield format_event(self.base | chunk)
        yield DONE

    def error(self, error: APIError) -> str:
        return format_event(error.body())

    def _chunk(self, index: int, delta: dict[str, str], finish_reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return format_event(self.base | {"object": "chat.completion.chunk", "choices": [choice]})

    def _logprobs(self, new: TextDelta) -> dict[str, Any] | None:
        return {"content": token_logprobs(new, self.decode), "refusal": None} if new.logprobs else None


def token_logprobs(new: TextDelta, decode: Decode) -> list[dict[str, Any]]:
    """OpenAI's list of tokens with their log-probabilities and alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = decode([token_id])
        return {"token": text, "logprob": as_json_number(logprob), "bytes": list(text.encode("utf-8", "replace"))}

    return [
        entry(token_id, logprobs.logprob) | {"top_logprobs": [entry(*one) for one in logprobs.top]}
        for token_id, logprobs in new.logprobs
    ]


def as_json_number(logprob: float) -> float:
    """JSON has no infinity; vLLM's least log-probability stands for it."""
    return max(logprob, LEAST_LOGPROB)


class CompletionFormat:
    """Completions: the texts alone."""

    def __init__(self, request_id: str, model: str, decode: Decode):
        head = {"id": f"cmpl-{request_id}", "object": "text_completion"}
        self.base = head | {"created": int(time.time()), "model": model}
        self.decode = decode
        self._lengths: dict[int, int] = {}  # characters of each text that were sent already

    def response(self, answers: Sequence[TextDelta], finish_reasons: Sequence[str | None], usage: Usage) -> dict:
        choices = [self._choice(*entry) for entry in zip(range(len(answers)), answers, finish_reasons)]
        return self.base | {"choices": choices, "usage": usage.as_dict()}

    def start(self, n: int) -> Iterator[str]:
        return iter(())

    def delta(self, index: int, new: TextDelta, finish_reason: str | None) -> Iterator[str]:
        if new.text or new.logprobs or finish_reason:
            yield format_event(self.base | {"choices": [self._choice(index, new, finish_reason)]})

    def end(self, usage: Usage, include_usage: bool) -> Iterator[str]:
        if include_usage:
            yield format_event(self.base | {"choices": [], "usage": usage.as_dict()})
        yield DONE

    def error(self, error: APIError) -> str:
        return format_event(error.body())

    def _choice(self, index: int, new: TextDelta, finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(index, new) if new.logprobs else None
        self._lengths[index] = self._lengths.get(index, 0) + len(new.text)
        return {"index": index, "text": new.text, "finish_reason": finish_reason, "logprobs": logprobs}

    def _logprobs(self, index: int, new: TextDelta) -> dict[str, Any]:
        tokens = [self.decode([token_id]) for token_id, _ in new.logprobs]
        start = self._lengths.get(index, 0)
        return {
            "tokens": tokens,
            "token_logprobs": [as_json_number(logprobs.logprob) for _, logprobs in new.logprobs],
            "top_logprobs": [
                {self.decode([top_id]): as_json_number(logprob) for top_id, logprob in logprobs.top}
                for _, logprobs in new.logprobs
            ],
            "text_offset": [start + sum(map(len, tokens[:i])) for i in range(len(tokens))],
        }


@dataclass
class ResponsesFormat:
    """The Responses API: one message of one text, and a stream of typed events."""

    request_id: str
    model: str
    decode: Decode
    created_at: float = field(default_factory=lambda: float(int(time.time())))
    answer: TextDelta = TextDelta()  # what was streamed so far
    finish_reason: str | None = None
    n_events: int = 0

    def response(self, answers: Sequence[TextDelta], finish_reasons: Sequence[str | None], usage: Usage) -> dict:
        (self.answer,), (self.finish_reason,) = answers, finish_reasons
        return self._response(usage)

    def start(self, n: int) -> Iterator[str]:
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())
        item = self._item("in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=self._part())

    def delta(self, index: int, new: TextDelta, finish_reason: str | None) -> Iterator[str]:
        self.answer += new
        self.finish_reason = finish_reason
        if new.text:
            logprobs = token_logprobs(new, self.decode)
            yield self._event("response.output_text.delta", **self._place, delta=new.text, logprobs=logprobs)

    def end(self, usage: Usage, include_usage: bool) -> Iterator[str]:
        part = self._part()
        yield self._event("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=self._item(self._status))
        yield self._event(f"response.{self._status}", response=self._response(usage))

    def error(self, error: APIError) -> str:
        return self._event("error", code=error.code, message=str(error), param=error.param)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.request_id}", "output_index": 0, "content_index": 0}

    @property
    def _status(self) -> str:
        return {None: "in_progress", "length": "incomplete"}.get(self.finish_reason, "completed")

    def _event(self, kind: str, **data: Any) -> str:
        self.n_events += 1
        return format_event({"type": kind, "sequence_number": self.n_events - 1} | data, kind)

    def _part(self) -> dict[str, Any]:
        logprobs = token_logprobs(self.answer, self.decode)
        return {"type": "output_text", "text": self.answer.text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: str) -> dict[str, Any]:
        message = {"id": f"msg_{self.request_id}", "type": "message", "role": "assistant", "status": status}
        return message | {"content": [self._part()]}

    def _response(self, usage: Usage | None = None) -> dict[str, Any]:
        """The response object, before the answer without its output and usage."""
        numbers: dict[str, Any] | None = None
        if usage is not None:
            numbers = usage.as_dict("input_tokens", "output_tokens") | {
                "output_tokens_details": {"reasoning_tokens": 0}
            }
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created_at,
            "model": self.model,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": [self._item(self._status)] if self.finish_reason else [],
            "usage": numbers,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "instructions": None,
            "metadata": {},
        }
