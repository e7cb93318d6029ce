"""What clients get: OpenAI's chat completions, whole or as the events of a stream."""

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

    def __init__(self, request_id: str, model: str, decode: Decode):
        self.head: dict[str, Any] = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
        self.decode = decode

    def response(self, answers: Sequence[TextDelta], finish_reasons: Sequence[str | None], usage: Usage) -> dict:
        choices = [self._whole(*entry) for entry in zip(range(len(answers)), answers, finish_reasons)]
        return self.head | {"object": "chat.completion", "choices": choices, "usage": usage.as_dict()}

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
        return format_event(self.head | {"object": "chat.completion.chunk"} | fields)

    def _chunk(self, index: int, delta: dict[str, str], finish_reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs}
        return self._event(choices=[choice | finish_fields(finish_reason)])

    def _whole(self, index: int, answer: TextDelta, finish_reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": self._logprobs(answer)}
        return choice | finish_fields(finish_reason)

    def _logprobs(self, new: TextDelta) -> dict[str, Any] | None:
        return {"content": token_logprobs(new, self.decode), "refusal": None} if new.logprobs else None
