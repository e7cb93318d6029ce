"""OpenAI's chat completions: what a request may hold, and the JSON of responses, their chunks and errors."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from models.errors import shortened
from nanovlm.errors import InputError
from nanovlm.options import GenerationOptions

DEFAULT_MAX_TOKENS = 256
NO_LIMIT = -1  # as max_tokens
ANY_OBJECT = {"type": "object"}  # the JSON schema of json_object
# Fields that clients send and that change no answer
HARMLESS = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "parallel_tool_calls"}
NEUTRAL: dict[str, list[Any]] = {  # values of fields that are not offered with which an answer stays as it is
    "n": [1],
    "logprobs": [False],
    "top_logprobs": [0],
    "logit_bias": [{}],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
}


class APIError(Exception):
    """An HTTP error for the client: a status and one sentence. param is the client's field."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(shortened(message))
        self.status, self.code, self.param, self.headers = status, code, param, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Record(BaseModel):
    """A JSON object without conversions between types; a field that is null counts as absent."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


def text_as(expand: Callable[[str], Any]) -> BeforeValidator:
    """Let a client send a text as the short form of a field."""
    return BeforeValidator(lambda value: expand(value) if isinstance(value, str) else value)


class ImageURL(Record):
    url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"  # low: the image is one tile


class Part(Record):
    """A text, or an image."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: Annotated[ImageURL | None, text_as(lambda url: {"url": url})] = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if getattr(self, self.type) is None:
            raise ValueError(f"a part of type {self.type} needs the field {self.type}")
        return self


class Message(Record):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[Part], Field(fail_fast=True), text_as(lambda text: [{"type": "text", "text": text}])
    ] = []  # an assistant that only called tools has none

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content if part.text is not None)

    @property
    def images(self) -> list[ImageURL]:
        return [part.image_url for part in self.content if part.image_url is not None]


class JSONSchema(Record):
    json_schema: dict[str, Any] = Field(alias="schema", default=ANY_OBJECT)


class ResponseFormat(Record):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JSONSchema = JSONSchema()


class StreamOptions(Record):
    include_usage: bool = False


def check_limit(limit: int) -> int:
    if limit < 1 and limit != NO_LIMIT:
        raise ValueError(f"{limit} must be at least 1, or -1 for no limit")
    return limit


MaxTokens = Annotated[int, AfterValidator(check_limit)]
Unset = AfterValidator(lambda value: None if value == -1 else value)  # vLLM's -1


class ChatRequest(Record):
    """POST /v1/chat/completions. A field that would change the answer and is not here is refused.

    Beside OpenAI's fields there are vLLM's top_k, min_p and repetition_penalty. Greedy by default, unlike OpenAI's
    temperature of 1, at which small models lose the thread.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: list[Message] = Field(min_length=1, max_length=1000)
    model: str = ""  # the server has one, which answers by whatever name
    max_completion_tokens: MaxTokens | None = None
    max_tokens: MaxTokens | None = None
    stop: Annotated[list[str], text_as(lambda text: [text])] = Field([], max_length=4)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()
    # Those of GenerationOptions, whose defaults they have:
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, Unset] = None
    min_p: float | None = None
    seed: Annotated[int | None, Unset] = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        ignored = HARMLESS | ({"tools", "functions"} if "none" in (data.get("tool_choice"), data.get("function_call"))
                              else set())  # fmt: skip
        return {
            name: value for name, value in data.items() if name not in ignored and value not in NEUTRAL.get(name, ())
        }

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """The request in a JSON body; APIError 400 names the first field that is wrong."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            raise APIError(400, f"{path} is not supported by this server; leave it out", param=path)
        raise APIError(400, f"{path}: {message}" if path else message, param=path or None)

    @property
    def schema_to_follow(self) -> Any:
        """The JSON schema of the answer; None for free text."""
        if self.response_format.type == "json_schema":
            return self.response_format.json_schema.json_schema
        return ANY_OBJECT if self.response_format.type == "json_object" else None

    def options(self) -> GenerationOptions:
        """How to choose tokens."""
        names = GenerationOptions.__dataclass_fields__.keys() & type(self).model_fields.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        try:
            return GenerationOptions(**given, schema=self.schema_to_follow)
        except InputError as error:  # it begins with name=value
            raise APIError(400, str(error), param=str(error).partition("=")[0]) from None

    def max_new_tokens(self, room: int, default: int = DEFAULT_MAX_TOKENS) -> int:
        """The length of the answer at most; the context has room for that many tokens."""
        limit = self.max_completion_tokens or self.max_tokens or default
        return room if limit == NO_LIMIT else min(limit, room)


class StopStrings:
    """Text up to the first stop string. What may be the beginning of one is held back until more text decides."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.held = [stop for stop in stops if stop], ""

    def add(self, text: str, is_last: bool = False) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string ends it."""
        self.held += text
        found = [(self.held.find(stop) + len(stop), -len(stop)) for stop in self.stops if stop in self.held]
        if found:  # the one that is complete first; of two such, the longer one
            end, negative_length = min(found)
            return self.held[: end + negative_length], True
        n_held = 0 if is_last else max(map(self._n_held, self.stops), default=0)
        certain = self.held[: len(self.held) - n_held]
        self.held = self.held[len(certain) :]
        return certain, False

    def _n_held(self, stop: str) -> int:
        """Length of the longest beginning of a stop string that the text ends with."""
        lengths = range(min(len(stop) - 1, len(self.held)), 0, -1)
        return next((n for n in lengths if self.held.endswith(stop[:n])), 0)


@dataclass(eq=False)
class Response:
    """One answer, as OpenAI's JSON: whole, or in the events of a stream."""

    model: str
    active: set["Response"] = field(default_factory=set, repr=False)  # those that are not released
    status: int = 200
    n_images: int = 0
    prompt_tokens: int = 0  # image tokens included
    cached_tokens: int = 0  # of the prompt
    completion_tokens: int = 0  # end token included
    finish_reason: str | None = None
    pieces: AsyncGenerator[str, None] | None = None  # of its text, while it is generated
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.active.add(self)

    async def release(self) -> None:
        """Give the place back; an answer that is still generated is cancelled."""
        self.active.discard(self)
        if self.pieces is not None:
            await self.pieces.aclose()

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def whole(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._json("chat.completion", [{"message": message} | self._end()]) | {"usage": self.usage}

    def chunk(self, delta: dict[str, str], is_last: bool = False) -> str:
        return event(self._json("chat.completion.chunk", [{"delta": delta} | self._end(is_last)]))

    def usage_chunk(self) -> str:
        return event(self._json("chat.completion.chunk", []) | {"usage": self.usage})

    def _json(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": int(self.created), "model": self.model}
        return head | {"choices": [{"index": 0, "logprobs": None} | choice for choice in choices]}

    def _end(self, is_last: bool = True) -> dict[str, str | None]:
        """OpenAI knows no end by repetition: it is a stop, whose reason vLLM names."""
        reason = self.finish_reason if is_last else None
        if reason == "repetition":
            return {"finish_reason": "stop", "stop_reason": reason}
        return {"finish_reason": reason}


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
