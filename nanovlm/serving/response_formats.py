"""What clients get: OpenAI's chat completions and responses, whole or as the events of a stream."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from models.inference.requests import TokenLogprobs
from nanovlm.serving.errors import APIError

LEAST_LOGPROB = -9999.0  # vLLM's; JSON has no infinity
DONE = "data: [DONE]\n\n"
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


def format_event(data: dict[str, Any], name: str | None = None) -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def token_logprobs(new: TextDelta, decode: Decode) -> list[dict[str, Any]]:
    """OpenAI's list of tokens with their log-probabilities and alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = decode([token_id])
        encoded = list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": encoded}

    return [
        entry(token_id, logprobs.logprob) | {"top_logprobs": [entry(*one) for one in logprobs.top]}
        for token_id, logprobs in new.logprobs
    ]


def finish_fields(reason: str | None) -> dict[str, str | None]:
    """How an answer ended: OpenAI knows no end for repetition, it is a stop whose reason is named as vLLM does."""
    return {"finish_reason": "stop", "stop_reason": reason} if reason == "repetition" else {"finish_reason": reason}


class ChatFormat:
    """Chat completions: `response` is the whole answer, the other methods are the events of a stream, in their order.

    All chunks of a stream share an id, the model's name and the time of creation.
    """

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, request_id: str, model: str, decode: Decode):
        self.head: dict[str, Any] = {"id": self.id_prefix + request_id, "created": int(time.time()), "model": model}
        self.decode = decode

    def response(self, answers: Sequence[TextDelta], finish_reasons: Sequence[str | None], usage: Usage) -> dict:
        choices = [self._whole(*entry) for entry in zip(range(len(answers)), answers, finish_reasons)]
        return self.head | {"object": self.whole_object, "choices": choices, "usage": usage.as_dict()}

    def start(self, n: int) -> Iterator[str]:
        """The first events of a stream of n answers."""
        return (self._chunk(index, {"role": "assistant", "content": ""}) for index in range(n))

    def delta(self, index: int, new: TextDelta, finish_reason: str | None) -> Iterator[str]:
        """The events for new text of an answer, or for its end."""
        if new.text or new.logprobs:
            yield self._chunk(index, {"content": new.text}, logprobs=self._logprobs(new))
        if finish_reason:
            yield self._chunk(index, {}, finish_reason)

    def end(self, usage: Usage, include_usage: bool) -> Iterator[str]:
        """The last events."""
        if include_usage:
            yield self._event(choices=[], usage=usage.as_dict())
        yield DONE

    def error(self, error: APIError) -> str:
        """The last event of a stream that failed."""
        return format_event(error.body())

    def _event(self, **fields: Any) -> str:
        return format_event(self.head | {"object": self.chunk_object} | fields)

    def _chunk(self, index: int, delta: dict[str, str], finish_reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs}
        return self._event(choices=[choice | finish_fields(finish_reason)])

    def _whole(self, index: int, answer: TextDelta, finish_reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": self._logprobs(answer)}
        return choice | finish_fields(finish_reason)

    def _logprobs(self, new: TextDelta) -> dict[str, Any] | None:
        return {"content": token_logprobs(new, self.decode), "refusal": None} if new.logprobs else None


class ResponsesFormat(ChatFormat):
    """The Responses API: one message of one text, and a stream of typed events."""

    id_prefix = "resp_"

    def __init__(self, request_id: str, model: str, decode: Decode):
        super().__init__(request_id, model, decode)
        self.message_id, self.n_events = f"msg_{request_id}", 0
        self.place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        self.answer, self.status = TextDelta(), "in_progress"  # what was streamed so far

    def response(self, answers: Sequence[TextDelta], finish_reasons: Sequence[str | None], usage: Usage) -> dict:
        self._add(answers[0], finish_reasons[0])
        return self._response(usage)

    def start(self, n: int) -> Iterator[str]:
        yield self._typed("response.created", response=self._response())
        yield self._typed("response.in_progress", response=self._response())
        yield self._typed("response.output_item.added", output_index=0, item=self._item() | {"content": []})
        yield self._typed("response.content_part.added", **self.place, part=self._part())

    def delta(self, index: int, new: TextDelta, finish_reason: str | None) -> Iterator[str]:
        self._add(new, finish_reason)
        if new.text:
            logprobs = token_logprobs(new, self.decode)
            yield self._typed("response.output_text.delta", **self.place, delta=new.text, logprobs=logprobs)

    def end(self, usage: Usage, include_usage: bool) -> Iterator[str]:
        part = self._part()
        yield self._typed("response.output_text.done", **self.place, text=part["text"], logprobs=part["logprobs"])
        yield self._typed("response.content_part.done", **self.place, part=part)
        yield self._typed("response.output_item.done", output_index=0, item=self._item())
        yield self._typed(f"response.{self.status}", response=self._response(usage))

    def error(self, error: APIError) -> str:
        return self._typed("error", code=error.code, message=str(error), param=error.param)

    def _add(self, new: TextDelta, finish_reason: str | None) -> None:
        self.answer += new
        self.status = {None: "in_progress", "length": "incomplete"}.get(finish_reason, "completed")

    def _typed(self, kind: str, **data: Any) -> str:
        self.n_events += 1
        return format_event({"type": kind, "sequence_number": self.n_events - 1} | data, kind)

    def _part(self) -> dict[str, Any]:
        logprobs = token_logprobs(self.answer, self.decode)
        return {"type": "output_text", "text": self.answer.text, "annotations": [], "logprobs": logprobs}

    def _item(self) -> dict[str, Any]:
        message = {"id": self.message_id, "type": "message", "role": "assistant", "status": self.status}
        return message | {"content": [self._part()]}

    def _response(self, usage: Usage | None = None) -> dict[str, Any]:
        """The response object; before the answer it has no output and no usage."""
        counts = usage and usage.as_dict("input_tokens", "output_tokens")
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": float(self.head["created"]),
            "model": self.head["model"],
            "status": self.status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": [self._item()] if counts else [],
            "usage": counts and counts | {"output_tokens_details": {"reasoning_tokens": 0}},
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "instructions": None,
            "metadata": {},
        }
