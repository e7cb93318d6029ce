"""What clients send: OpenAI's chat completions, completions and responses."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from models.decoding import SamplingParams
from nanovlm.errors import InputError
from nanovlm.serving.errors import APIError

MAX_MESSAGES = 1000
MAX_PROMPTS = 64
MAX_N = 16
MAX_STOP_STRINGS = 4
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
NO_LIMIT = -1  # as max_tokens


def _drop_nulls(data: Any) -> Any:
    return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StrictModel(BaseModel):
    """No conversions between types; a field that is null counts as absent."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        return _drop_nulls(data)


# ------------------------------------------------------------------------------------------------------------ messages


class ImageURL(StrictModel):
    url: str


def _as_image_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class TextPart(StrictModel):
    type: Literal["text", "input_text", "output_text"]  # the last two are those of the Responses API
    text: str


class ImagePart(StrictModel):
    type: Literal["image_url", "input_image"]
    image_url: Annotated[ImageURL, BeforeValidator(_as_image_url)]


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[ContentPart], BeforeValidator(_as_parts)]

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        data = _drop_nulls(data)
        if isinstance(data, dict) and data.get("role") == "assistant":  # null if it only called tools
            data = {"content": []} | data
        return data

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def image_urls(self) -> list[str]:
        return [part.image_url.url for part in self.content if isinstance(part, ImagePart)]


# ------------------------------------------------------------------------------------------------------------ requests


class JSONSchemaFormat(StrictModel):
    json_schema: dict[str, Any] | bool = Field(alias="schema", default_factory=lambda: {"type": "object"})


class ResponseFormat(StrictModel):
    """OpenAI's response_format, and its text.format of the Responses API, which has the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JSONSchemaFormat | None = None
    flat_schema: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def required_schema(self) -> Any:
        """The JSON schema that the answer must follow; None for free text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        return self.json_schema.json_schema if self.json_schema else self.flat_schema or {"type": "object"}


class StreamOptions(StrictModel):
    include_usage: bool = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _at_least_one_or_no_limit(value: Any) -> Any:
    if value == 0 or (isinstance(value, int) and value < NO_LIMIT):
        raise ValueError("Input should be greater than or equal to 1, or -1 for no limit")
    return value


def unsupported(*harmless: Any) -> BeforeValidator:
    """Marks a field that this server does not implement; harmless values change nothing."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value not in harmless:
            raise ValueError(f"{info.field_name} is not supported by this server; leave it out")
        return value

    return BeforeValidator(check)


MaxTokens = Annotated[int | None, BeforeValidator(_at_least_one_or_no_limit)]


class GenerationFields(StrictModel):
    """What all requests have in common, with vLLM's top_k, min_p and repetition_penalty beside OpenAI's fields.

    Greedy by default, unlike OpenAI's temperature of 1, at which small models lose the thread.
    """

    max_tokens_fields: ClassVar[tuple[str, ...]]  # the client's names of the limit; the first that is given counts
    default_max_tokens: ClassVar[int] = 256  # mlx-vlm's
    prompt_field: ClassVar[str]  # the client's name of what the model reads
    schema_field: ClassVar[str] = "response_format"  # and of the schema

    model: str | None = None
    stream: bool = False
    n: int = Field(1, ge=1, le=MAX_N)
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field([], max_length=MAX_STOP_STRINGS)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Annotated[Any, unsupported({})] = None

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        unlimited = {name: NO_LIMIT for name in cls.max_tokens_fields if name in data and data[name] is None}
        if any(data.get(name) is not None for name in cls.max_tokens_fields):
            unlimited = {}
        return _drop_nulls(data) | unlimited

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """The request in a JSON body; APIError 400 names the first field that is wrong."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise _as_api_error(first, body) from None

    @property
    def max_tokens_field(self) -> str:
        """The name of the field that limits the answer."""
        given = (name for name in self.max_tokens_fields if getattr(self, name) is not None)
        return next(given, self.max_tokens_fields[0])

    @property
    def limit(self) -> int | None:
        """How many tokens to generate at most; None for no limit."""
        limit = getattr(self, self.max_tokens_field)
        if limit is None:
            return self.default_max_tokens
        return None if limit == NO_LIMIT else limit

    @property
    def n_sequences(self) -> int:
        """How many sequences are generated."""
        return self.n

    @property
    def n_logprobs(self) -> int | None:
        """How many most likely tokens to report beside each token; None to report no log-probabilities."""
        return None

    @property
    def required_schema(self) -> Any:
        """The JSON schema that the answer must follow; None for free text."""
        return None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return True

    def sampling_params(self) -> list[SamplingParams]:
        """One for each of n sequences. With a seed each has its own, and the first is that of n=1."""
        names = [name for name in SamplingParams.__dataclass_fields__ if name != "seed"]
        options = {name: getattr(self, name) for name in names}
        options["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's word for all
        try:
            first = SamplingParams(**options, seed=self.seed)
            seeds = [None if self.seed is None else (self.seed + i) % 2**63 for i in range(1, self.n)]
            return [first, *(SamplingParams(**options, seed=seed) for seed in seeds)]
        except InputError as error:  # it begins with name=value
            raise APIError(400, str(error), param=str(error).partition("=")[0]) from None


class CompletionFields(GenerationFields):
    """What the two older kinds of requests have in common."""

    max_tokens: MaxTokens = None
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None

    @property
    def required_schema(self) -> Any:
        return self.response_format.required_schema if self.response_format else None

    @property
    def include_usage(self) -> bool:
        return self.stream_options.include_usage


class ChatCompletionRequest(CompletionFields):
    """POST /v1/chat/completions."""

    max_tokens_fields = ("max_completion_tokens", "max_tokens")
    prompt_field = "messages"

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: MaxTokens = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    audio: Annotated[Any, unsupported()] = None
    function_call: Annotated[Any, unsupported("none", "auto")] = None
    functions: Annotated[Any, unsupported([])] = None
    modalities: Annotated[Any, unsupported(["text"])] = None
    tool_choice: Annotated[Any, unsupported("none", "auto")] = None
    tools: Annotated[Any, unsupported([])] = None

    @property
    def n_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def _as_prompts(value: Any) -> Any:
    """One prompt or several, each text or token ids."""
    one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    return [value] if one else value


class CompletionRequest(CompletionFields):
    """POST /v1/completions: the model continues a text, which the client lays out by itself."""

    max_tokens_fields = ("max_tokens",)
    prompt_field = "prompt"
    default_max_tokens = 16  # OpenAI's and vLLM's; such texts rarely end by themselves

    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_prompts)] = Field(min_length=1, max_length=MAX_PROMPTS)
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: Annotated[Any, unsupported(False)] = None
    best_of: Annotated[Any, unsupported(1)] = None
    suffix: Annotated[Any, unsupported("")] = None

    @property
    def n_sequences(self) -> int:
        return self.n * len(self.prompt)

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs


class ResponseText(StrictModel):
    format: ResponseFormat | None = None


def _as_messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(GenerationFields):
    """POST /v1/responses. The server stores nothing: send earlier turns as input."""

    max_tokens_fields = ("max_output_tokens",)
    prompt_field = "input"
    schema_field = "text.format"

    input: Annotated[list[Message], BeforeValidator(_as_messages)] = Field(min_length=1, max_length=MAX_MESSAGES)
    instructions: str = ""
    max_output_tokens: MaxTokens = None
    text: ResponseText = ResponseText()
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] = []
    n: Literal[1] = 1
    background: Annotated[Any, unsupported(False)] = None
    conversation: Annotated[Any, unsupported()] = None
    previous_response_id: Annotated[Any, unsupported()] = None
    prompt: Annotated[Any, unsupported()] = None
    tool_choice: Annotated[Any, unsupported("none", "auto")] = None
    tools: Annotated[Any, unsupported([])] = None

    @property
    def messages(self) -> list[Message]:
        if not self.instructions:
            return self.input
        system = Message(role="system", content=[TextPart(type="text", text=self.instructions)])
        return [system, *self.input]

    @property
    def n_logprobs(self) -> int | None:
        wanted = "message.output_text.logprobs" in self.include or self.top_logprobs is not None
        return (self.top_logprobs or 0) if wanted else None

    @property
    def required_schema(self) -> Any:
        return self.text.format.required_schema if self.text.format else None


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
