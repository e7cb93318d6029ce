"""OpenAI's chat completions: what a request may hold, and the JSON of responses and their chunks."""

import json
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from nanovlm.console import count
from nanovlm.options import GenerationOptions
from nanovlm.processing.conversation import Turn
from nanovlm.serving.web import APIError

NO_LIMIT = -1  # as max_tokens
ANY_OBJECT = {"type": "object"}  # the JSON schema of json_object
MAX_VALUES = 10_000  # of a request, counted before it is parsed
MAX_FIELDS = 100  # of an object
MAX_ITEMS = 1000  # messages, and parts of one
# pydantic's name of the kind of a part or format, in a path
TAG = re.compile(r"^(messages\.\d+\.content\.\d+|response_format)\.(text|image_url|refusal|json_object|json_schema)")


class Record(BaseModel):
    """A JSON object without conversions between types; a field that is not here is refused.

    A field that is null counts as absent, as do fields that clients send and that change no answer: those of HARMLESS,
    and those of NEUTRAL with one of its values.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    HARMLESS: ClassVar[set[str]] = set()
    NEUTRAL: ClassVar[dict[str, list[Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:  # each unknown one would be an error
            raise ValueError(f"an object of {len(data):,} fields, more than {MAX_FIELDS}; send less")
        known = {name: value for name, value in data.items() if value is not None and name not in cls.HARMLESS}
        return {name: value for name, value in known.items() if value not in cls.NEUTRAL.get(name, ())}


def text_as(expand: Callable[[str], Any]) -> BeforeValidator:
    """Let a client send a text as the short form of a field."""
    return BeforeValidator(lambda value: expand(value) if isinstance(value, str) else value)


Role = Literal["system", "developer", "user", "assistant"]


class ImageURL(Record):
    url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"  # low: the image is one tile


class Part(Record):
    HARMLESS = {"annotations", "cache_control"}


class TextPart(Part):
    type: Literal["text"]
    text: str


class ImagePart(Part):
    type: Literal["image_url"]
    image_url: Annotated[ImageURL, text_as(lambda url: {"url": url})]


class RefusalPart(Part):
    """A refusal of the assistant, which is its text."""

    type: Literal["refusal"]
    refusal: str


AnyPart = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]


class Message(Record):
    """A message; an assistant's is also taken as clients got it from here or elsewhere."""

    HARMLESS = {"annotations", "cache_control", "name", "parsed", "provider_specific_fields"}
    NEUTRAL = {"tool_calls": [[]], "reasoning": [""], "reasoning_content": [""]}

    role: Annotated[Role, AfterValidator(lambda role: "system" if role == "developer" else role)]
    content: Annotated[
        list[AnyPart],
        Field(fail_fast=True, max_length=MAX_ITEMS),
        text_as(lambda text: [{"type": "text", "text": text}]),
    ] = []  # an assistant that refused has none
    refusal: str | None = None

    @model_validator(mode="after")
    def _add_refusal(self) -> Self:
        if self.refusal is not None:
            self.content.append(RefusalPart(type="refusal", refusal=self.refusal))
        if self.role != "assistant" and any(isinstance(part, RefusalPart) for part in self.content):
            raise ValueError(f"only the assistant refuses; send the {self.role}'s text as text")
        return self

    @property
    def turn(self) -> Turn:
        return Turn(self.role, [getattr(part, part.type) for part in self.content])


class JSONSchema(Record):
    name: str = ""
    description: str = ""
    strict: bool = True
    schema_: Any = Field(alias="schema")


class TextFormat(Record):
    type: Literal["text"]
    followed: ClassVar[Any] = None


class ObjectFormat(Record):
    type: Literal["json_object"]
    followed: Any = Field(ANY_OBJECT, alias="schema")  # llama.cpp's


class SchemaFormat(Record):
    type: Literal["json_schema"]
    json_schema: JSONSchema

    @property
    def followed(self) -> Any:
        return self.json_schema.schema_


class StreamOptions(Record):
    HARMLESS = {"include_obfuscation"}
    NEUTRAL = {"continuous_usage_stats": [False]}

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

    HARMLESS = {
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "parallel_tool_calls",
        "reasoning_effort",  # without an effect on a model that does not reason, in vLLM and llama.cpp, too
    }  # fmt: skip
    NEUTRAL = {
        "n": [1], "logprobs": [False], "top_logprobs": [0], "logit_bias": [{}], "modalities": [["text"]],
        "tools": [[]], "tool_choice": ["none", "auto"], "functions": [[]], "function_call": ["none", "auto"],
    }  # fmt: skip

    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_ITEMS)]
    model: str = ""  # the server has one, which answers by whatever name
    max_completion_tokens: MaxTokens | None = None
    max_tokens: MaxTokens | None = None
    stop: Annotated[list[str], text_as(lambda text: [text])] = Field([], max_length=4)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: TextFormat | ObjectFormat | SchemaFormat = Field(TextFormat(type="text"), discriminator="type")
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
    def _drop_unused_tools(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "none" not in (data.get("tool_choice"), data.get("function_call")):
            return data
        return {name: value for name, value in data.items() if name not in ("tools", "functions")}

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """The request in a JSON body; APIError 400 names the first field that is wrong."""
        if body.count(b",") > MAX_VALUES:
            raise APIError(400, f"the request has more than {MAX_VALUES:,} values; send less")
        try:
            return cls.model_validate(json.loads(body, object_pairs_hook=without_duplicates))
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"invalid JSON: {error}") from None
        path = TAG.sub(r"\1", ".".join(map(str, problem["loc"])))
        path += ".type" * problem["type"].startswith("union_tag")
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            neutral = " or ".join(json.dumps(value) for value in cls.NEUTRAL.get(path, ()) if value)
            others = f", except for {neutral}" if neutral else ""
            remedy = "texts and images are parts of content" if path.startswith("messages.") else "leave it out"
            raise APIError(400, f"{path} is not supported by this server{others}; {remedy}", param=path)
        raise APIError(400, f"{path}: {message}" if path else message, param=path or None)

    def options(self) -> GenerationOptions:
        """How to choose tokens. InputError names the field that is wrong."""
        names = GenerationOptions.__dataclass_fields__.keys() & type(self).model_fields.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if limit := self.max_completion_tokens or self.max_tokens:
            given["max_new_tokens"] = sys.maxsize if limit == NO_LIMIT else limit
        return GenerationOptions(**given, schema=self.response_format.followed)


class StopStrings:
    """Text up to the first stop string. As much as could be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]):
        self.stops = [stop for stop in stops if stop]
        self.n_held = max(map(len, self.stops), default=1) - 1
        self.held = ""

    def add(self, text: str, is_last: bool = False) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string ends it."""
        self.held += text
        starts = {stop: self.held.find(stop) for stop in self.stops if stop in self.held}
        if starts:  # the one that is complete first; of two such, the longer one
            _, start = min((start + len(stop), start) for stop, start in starts.items())
            return self.held[:start], True
        n_certain = len(self.held) if is_last else max(0, len(self.held) - self.n_held)
        certain = self.held[:n_certain]
        self.held = self.held[n_certain:]
        return certain, False


@dataclass(eq=False)
class Response:
    """One answer, as OpenAI's JSON: whole, or in the events of a stream."""

    model: str
    pieces: Any = None  # an AsyncGenerator of its text; closing it cancels the answer
    n_images: int = 0
    prompt_tokens: int = 0  # image tokens included
    cached_tokens: int = 0  # of the prompt
    completion_tokens: int = 0  # end token included
    finish_reason: str | None = None  # of a complete answer
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def summary(self, seconds: float) -> str:
        """Counts and speed, for the log."""
        speed = self.completion_tokens / max(seconds, 1e-9)
        tokens = f"{self.prompt_tokens} + {self.completion_tokens} tokens"
        return f"{count(self.n_images, 'image')}, {tokens}, {seconds:.2f} s, {speed:.1f} tokens/s"

    def whole(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._json("chat.completion", message=message) | {"usage": self._usage()}

    def chunk(self, **delta: str) -> str:
        return event(self._json("chat.completion.chunk", delta=delta))

    def usage_chunk(self) -> str:
        return event(self._json("chat.completion.chunk") | {"choices": [], "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        usage["total_tokens"] = sum(usage.values())
        return usage | {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}

    def _json(self, kind: str, **content: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": None, "finish_reason": self.finish_reason} | content
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": [choice]}


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if a key stands in it twice, as readers differ in which one counts."""
    record = dict(pairs)
    if len(record) < len(pairs):
        key, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{key!r} stands twice in one object")
    return record


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
