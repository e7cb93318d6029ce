"""What clients get: OpenAI's chat completions, whole or as the events of a stream."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanovlm.serving.errors import APIError

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    """Prompt tokens, image tokens included; and generated tokens, end token included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def format_event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def finish_fields(reason: str | None) -> dict[str, str | None]:
    """How an answer ended: OpenAI knows no end for repetition, it is a stop whose reason is named as vLLM does."""
    return {"finish_reason": "stop", "stop_reason": reason} if reason == "repetition" else {"finish_reason": reason}


class ChatFormat:
    """Chat completions: `response` is the whole answer, the other methods are the events of a stream, in their order.

    All chunks of a stream share an id, the model's name and the time of creation.
    """

    def __init__(self, request_id: str, model: str):
        self.head: dict[str, Any] = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}

    def response(self, text: str, finish_reason: str | None, usage: Usage) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None} | finish_fields(finish_reason)
        return self.head | {"object": "chat.completion", "choices": [choice], "usage": usage.as_dict()}

    def start(self) -> str:
        """The first event."""
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, text: str, finish_reason: str | None) -> Iterator[str]:
        """The events for new text, or for the answer's end."""
        if text:
            yield self._chunk({"content": text})
        if finish_reason:
            yield self._chunk({}, finish_reason)

    def end(self, usage: Usage, include_usage: bool) -> Iterator[str]:
        """The last events."""
        if include_usage:
            yield self._event(choices=[], usage=usage.as_dict())
        yield DONE

    def error(self, error: APIError) -> str:
        """The last event of a stream that failed."""
        return format_event(error.body())

    def _event(self, **fields: Any) -> str:
        return format_event(self.head | {"object": "chat.completion.chunk"} | fields)

    def _chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None} | finish_fields(finish_reason)
        return self._event(choices=[choice])
