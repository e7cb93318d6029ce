"""What clients send: OpenAI's chat completions."""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from nanovlm.errors import InputError
from nanovlm.options import GenerationOptions
from nanovlm.serving.errors import APIError

MAX_MESSAGES = 1000
MAX_STOP_STRINGS = 4
DEFAULT_MAX_TOKENS = 256  # mlx-vlm's
NO_LIMIT = -1  # as max_tokens
ANY_OBJECT = {"type": "object"}  # a JSON schema
MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens")  # the first that is given counts
UNSUPPORTED: dict[str, list[Any]] = {  # fields that the server refuses, unless they have one of these values
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "audio": [],
    "modalities": [["text"]],
    "n": [1],
    "logprobs": [False],
    "top_logprobs": [0],
    "logit_bias": [{}],
}


class StrictModel(BaseModel):
    """No conversions between types; a field that is null counts as absent."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


def text_as(expand: Callable[[str], Any]) -> BeforeValidator:
    """Lets a client send a text as the short form of a field."""
    return BeforeValidator(lambda value: expand(value) if isinstance(value, str) else value)


# ------------------------------------------------------------------------------------------------------------ messages


class MediaURL(StrictModel):
    url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"  # low: an image is one tile


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: Annotated[MediaURL, text_as(lambda url: {"url": url})]


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[ContentPart], Field(fail_fast=True), text_as(lambda text: [{"type": "text", "text": text}])]

    @model_validator(mode="before")
    @classmethod
    def _allow_no_content(cls, data: Any) -> Any:  # of an assistant that only called tools
        if isinstance(data, dict) and data.get("role") == "assistant" and data.get("content") is None:
            return data | {"content": []}
        return data

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def image_urls(self) -> list[MediaURL]:
        return [part.image_url for part in self.content if isinstance(part, ImagePart)]


class JSONSchemaFormat(StrictModel):
    json_schema: dict[str, Any] | bool = Field(alias="schema", default=ANY_OBJECT)


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JSONSchemaFormat | None = None

    def required_schema(self) -> Any:
        """The JSON schema that the answer must follow; None for free text."""
        if self.type != "json_schema":
            return ANY_OBJECT if self.type == "json_object" else None
        return self.json_schema.json_schema if self.json_schema else ANY_OBJECT


class RepetitionDetection(StrictModel):
    """vLLM's names for the bounds of a cycle; a largest size of 0 is off."""

    min_pattern_size: int = 1
    max_pattern_size: int = 0
    min_count: int = 2

    def bounds(self) -> tuple[int, int, int]:
        return (max(1, self.min_pattern_size), self.max_pattern_size, self.min_count if self.max_pattern_size else 0)


class StreamOptions(StrictModel):
    include_usage: bool = False


def _as_max_tokens(limit: int) -> int | None:
    if limit < 1 and limit != NO_LIMIT:
        raise ValueError("Input should be greater than or equal to 1, or -1 for no limit")
    return None if limit == NO_LIMIT else limit


MaxTokens = Annotated[int | None, AfterValidator(_as_max_tokens)]  # None: as many as the context has room for


class ChatCompletionRequest(StrictModel):
    """POST /v1/chat/completions.

    Beside OpenAI's fields there are vLLM's top_k, min_p, repetition_penalty and repetition_detection. Greedy by
    default, unlike OpenAI's temperature of 1, at which small models lose the thread.
    """

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool = False
    stop: Annotated[list[str], text_as(lambda text: [text])] = Field([], max_length=MAX_STOP_STRINGS)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: Annotated[int, AfterValidator(lambda k: 0 if k == -1 else k)] = 0  # -1 is vLLM's word for all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: Annotated[int | None, AfterValidator(lambda seed: None if seed == -1 else seed)] = None  # as vLLM
    repetition_detection: RepetitionDetection | None = None
    max_tokens: MaxTokens = Field(DEFAULT_MAX_TOKENS, validation_alias=AliasChoices(*MAX_TOKENS_FIELDS))
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()

    @model_validator(mode="before")
    @classmethod
    def _read_nulls(cls, data: Any) -> Any:
        """A limit that is null is no limit; every other null is dropped after this."""
        if not isinstance(data, dict):
            return data
        if data.get("tool_choice") == "none":
            data = data | {"tools": None}
        for name, harmless in UNSUPPORTED.items():
            if data.get(name) is not None and data[name] not in harmless:
                raise APIError(400, f"{name} is not supported by this server; leave it out", param=name)
        limits = {name: data[name] for name in MAX_TOKENS_FIELDS if name in data}
        return data if any(limit is not None for limit in limits.values()) else data | dict.fromkeys(limits, NO_LIMIT)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """The request in a client's JSON body; APIError 400 names the first field that is wrong."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise _as_api_error(first, body) from None

    @property
    def text(self) -> str:
        """All text that is to be read."""
        return "".join(message.text for message in self.messages)

    def sampling(self) -> GenerationOptions:
        names = GenerationOptions.__dataclass_fields__.keys() & type(self).model_fields.keys()
        options = {name: getattr(self, name) for name in names}
        if isinstance(detection := options.pop("repetition_detection"), RepetitionDetection):
            options["repetition_detection"] = detection.bounds()
        try:
            return GenerationOptions(**options)
        except InputError as error:  # it begins with name=value
            raise APIError(400, str(error), param=str(error).partition("=")[0]) from None


# -------------------------------------------------------------------------------------------------------------- errors


def _as_api_error(details: Any, body: bytes) -> APIError:
    """Status 400 for the first of pydantic's errors, with the path of the client's field."""
    path = _field_path(details["loc"], json.loads(body) if details["loc"] else None)
    message = details["msg"].removeprefix("Value error, ")
    if path and not message.startswith(path.rpartition(".")[2] + " "):
        message = f"{path}: {message}"
    return APIError(400, message, param=path or None)


def _field_path(loc: Sequence[str | int], data: Any) -> str:
    """The path in the client's JSON; pydantic adds the names of types where a field may have several."""
    path = []
    for i, step in enumerate(loc):
        is_type = i > 0 and isinstance(loc[i - 1], int) and isinstance(data, dict) and data.get("type") == step
        if is_type or not isinstance(data, (dict, list)) or isinstance(data, list) != isinstance(step, int):
            continue
        path.append(str(step))
        data = data.get(step) if isinstance(data, dict) else data[int(step)]
    return ".".join(path)
