"""What clients send: OpenAI's chat completions, completions and responses, each read into one `GenerationRequest`."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from nanovlm.errors import InputError
from nanovlm.options import GenerationOptions
from nanovlm.serving.errors import APIError

MAX_MESSAGES = 1000
MAX_PROMPTS = 64
MAX_N = 16
MAX_STOP_STRINGS = 4
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD = 100  # characters
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
NO_LIMIT = -1  # as max_tokens
ANY_OBJECT = {"type": "object"}  # a JSON schema
NO_TOOLS: dict[str, list[Any]] = {"tools": [[]], "tool_choice": ["none", "auto"]}


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
    detail: Literal["auto", "low", "high"] = "auto"  # low: an image is one tile


class TextPart(StrictModel):
    type: Literal["text", "input_text", "output_text"]  # the last two are those of the Responses API
    text: str


class ImagePart(StrictModel):
    type: Literal["image_url", "input_image"]
    image_url: Annotated[MediaURL, text_as(lambda url: {"url": url})]


class VideoPart(StrictModel):
    type: Literal["video_url"]  # vLLM's
    video_url: Annotated[MediaURL, text_as(lambda url: {"url": url})]


ContentPart = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


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


# -------------------------------------------------------------------------------------------------------- the request


@dataclass
class GenerationRequest:
    """What is to be generated, whichever way a client has said it; the *_field are its own names, for errors."""

    prompt_field: str
    sampling: list[GenerationOptions]  # one for each of n answers
    max_tokens: int | None  # None: as many as the context has room for
    messages: list[Message] = field(default_factory=list)
    prompts: list[str | list[int]] = field(default_factory=list)  # texts laid out by the client, instead of messages
    model: str | None = None
    client: str = ""  # its address; clients get fair shares
    stop: list[str] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)  # added to the logits of these ids
    top_logprobs: int | None = None  # how many likely tokens to report beside each token; None for no logprobs at all
    schema: Any = None  # the JSON schema that the answer must follow; None for free text
    schema_field: str = "response_format"
    stream: bool = False
    include_usage: bool = True  # at the end of a stream

    @property
    def n_sequences(self) -> int:
        return len(self.sampling) * max(1, len(self.prompts))


class JSONSchemaFormat(StrictModel):
    json_schema: dict[str, Any] | bool = Field(alias="schema", default=ANY_OBJECT)


class ResponseFormat(StrictModel):
    """OpenAI's response_format, and its text.format of the Responses API, which has the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JSONSchemaFormat | None = None
    flat_schema: dict[str, Any] | None = Field(default=None, alias="schema")

    def required_schema(self) -> Any:
        """The JSON schema that the answer must follow; None for free text."""
        if self.type != "json_schema":
            return ANY_OBJECT if self.type == "json_object" else None
        return self.json_schema.json_schema if self.json_schema else self.flat_schema or ANY_OBJECT


class RepetitionDetection(StrictModel):
    """vLLM's names for the bounds of a cycle; a largest size of 0 is off."""

    min_pattern_size: int = 1
    max_pattern_size: int = 0
    min_count: int = 2

    def bounds(self) -> tuple[int, int, int]:
        return (max(1, self.min_pattern_size), self.max_pattern_size, self.min_count if self.max_pattern_size else 0)


class StreamOptions(StrictModel):
    include_usage: bool = False


class Dialect(StrictModel, ABC):
    """What all requests have in common, with vLLM's top_k, min_p, repetition_penalty, repetition_detection
    and bad_words, and transformers' no_repeat_ngram_size, beside OpenAI's fields.

    Greedy by default, unlike OpenAI's temperature of 1, at which small models lose the thread.
    """

    max_tokens_fields: ClassVar[tuple[str, ...]]  # the client's names of the limit; the first that is given counts
    default_max_tokens: ClassVar[int] = 256  # mlx-vlm's
    unsupported: ClassVar[dict[str, list[Any]]]  # fields that the server refuses, unless they have one of these values

    model: str | None = None
    stream: bool = False
    n: int = Field(1, ge=1, le=MAX_N)
    stop: Annotated[list[str], text_as(lambda text: [text])] = Field([], max_length=MAX_STOP_STRINGS)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: Annotated[int, AfterValidator(lambda k: 0 if k == -1 else k)] = 0  # -1 is vLLM's word for all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[Annotated[int, Field(ge=0, strict=False)], Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=MAX_BIASES
    )
    no_repeat_ngram_size: int = 0
    bad_words: list[Annotated[str, Field(pattern=r"\S", max_length=MAX_BAD_WORD)]] = Field([], max_length=MAX_BAD_WORDS)
    repetition_detection: RepetitionDetection | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_nulls(cls, data: Any) -> Any:
        """A limit that is null is no limit; every other null is dropped after this."""
        if not isinstance(data, dict):
            return data
        for name, harmless in cls.unsupported.items():
            if data.get(name) is not None and data[name] not in harmless:
                raise APIError(400, f"{name} is not supported by this server; leave it out", param=name)
        names = cls.max_tokens_fields
        is_limited = any(data.get(name) is not None for name in names)
        return data if is_limited else data | {name: NO_LIMIT for name in names if name in data}

    @classmethod
    def parse(cls, body: bytes) -> GenerationRequest:
        """The request in a JSON body; APIError 400 names the first field that is wrong."""
        try:
            return cls.model_validate_json(body).request()
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise _as_api_error(first, body) from None

    @abstractmethod
    def request(self) -> GenerationRequest: ...

    def _request(self, prompt_field: str, **options: Any) -> GenerationRequest:
        given = {name: limit for name in self.max_tokens_fields if (limit := getattr(self, name)) is not None}
        name, limit = next(iter(given.items()), ("", self.default_max_tokens))
        if limit < 1 and limit != NO_LIMIT:
            message = f"{name}: Input should be greater than or equal to 1, or -1 for no limit"
            raise APIError(400, message, param=name)
        options |= {"model": self.model, "stop": self.stop, "stream": self.stream, "logit_bias": self.logit_bias}
        return GenerationRequest(prompt_field, self._sampling(), None if limit == NO_LIMIT else limit, **options)

    def _sampling(self) -> list[GenerationOptions]:
        """One for each of n answers. With a seed each has its own, and the first is that of n=1."""
        names = GenerationOptions.__dataclass_fields__.keys() & type(self).model_fields.keys()
        options = {name: getattr(self, name) for name in names}
        options["ban"] = tuple(self.bad_words)
        if isinstance(detection := options.pop("repetition_detection"), RepetitionDetection):
            options["repetition_detection"] = detection.bounds()
        try:
            first = GenerationOptions(**options)
        except InputError as error:  # it begins with name=value
            raise APIError(400, str(error), param=str(error).partition("=")[0]) from None
        seeds = [None if self.seed is None else (self.seed + i) % 2**63 for i in range(1, self.n)]
        return [first, *(replace(first, seed=seed) for seed in seeds)]


# ------------------------------------------------------------------------------------------------------- the dialects


class CompletionFields(Dialect):
    """What the two older kinds of requests have in common."""

    max_tokens: int | None = None
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()

    def _request(self, prompt_field: str, **options: Any) -> GenerationRequest:
        usage = self.stream_options.include_usage
        return super()._request(
            prompt_field, schema=self.response_format.required_schema(), include_usage=usage, **options
        )


class ChatCompletionRequest(CompletionFields):
    """POST /v1/chat/completions."""

    max_tokens_fields = ("max_completion_tokens", "max_tokens")
    unsupported = NO_TOOLS | {
        "audio": [],
        "function_call": ["none", "auto"],
        "functions": [[]],
        "modalities": [["text"]],
    }

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def request(self) -> GenerationRequest:
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._request("messages", messages=self.messages, top_logprobs=top_logprobs)


def _as_prompts(value: Any) -> Any:
    """One prompt or several, each text or token ids."""
    one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    return [value] if one else value


class CompletionRequest(CompletionFields):
    """POST /v1/completions: the model continues a text, which the client lays out by itself."""

    max_tokens_fields = ("max_tokens",)
    unsupported = {"echo": [False], "best_of": [1], "suffix": [""]}
    default_max_tokens = 16  # OpenAI's and vLLM's; such texts rarely end by themselves

    prompt: Annotated[list[str | Annotated[list[int], Field(fail_fast=True)]], BeforeValidator(_as_prompts)] = Field(
        min_length=1, max_length=MAX_PROMPTS
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)

    def request(self) -> GenerationRequest:
        return self._request("prompt", prompts=self.prompt, top_logprobs=self.logprobs)


class ResponseText(StrictModel):
    format: ResponseFormat = ResponseFormat()


class ResponsesRequest(Dialect):
    """POST /v1/responses. The server stores nothing: send earlier turns as input."""

    max_tokens_fields = ("max_output_tokens",)
    unsupported = NO_TOOLS | {"background": [False], "conversation": [], "previous_response_id": [], "prompt": []}

    input: Annotated[list[Message], text_as(lambda text: [{"role": "user", "content": text}])] = Field(
        min_length=1, max_length=MAX_MESSAGES
    )
    instructions: str = ""
    max_output_tokens: int | None = None
    text: ResponseText = ResponseText()
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] = Field([], fail_fast=True)
    n: Literal[1] = 1

    def request(self) -> GenerationRequest:
        instructions = TextPart(type="text", text=self.instructions)
        system = [Message(role="system", content=[instructions])] if self.instructions else []
        top_logprobs = self.top_logprobs
        if top_logprobs is None and "message.output_text.logprobs" in self.include:
            top_logprobs = 0
        schema = {"schema": self.text.format.required_schema(), "schema_field": "text.format"}
        return self._request("input", messages=system + self.input, top_logprobs=top_logprobs, **schema)


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
