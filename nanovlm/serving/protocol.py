"""OpenAI's chat completions: the request that clients send, and the responses they get."""

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from models.decoding import SamplingParams
from nanovlm.errors import InputError
from nanovlm.serving.errors import APIError

MAX_MESSAGES = 1000
MAX_N = 16
MAX_STOP_STRINGS = 4
UNSUPPORTED = {  # fields that this server does not implement, with the values that change nothing
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}


class StrictModel(BaseModel):
    """No conversions between types; a field that is null counts as absent."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class ImageURL(StrictModel):
    url: str


def _as_image_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: Annotated[ImageURL, BeforeValidator(_as_image_url)]


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[ContentPart], BeforeValidator(_as_parts)]

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def image_urls(self) -> list[str]:
        return [part.image_url.url for part in self.content if isinstance(part, ImagePart)]


class StreamOptions(StrictModel):
    include_usage: bool = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ChatCompletionRequest(StrictModel):
    """A request for a chat completion, with vLLM's top_k, min_p and repetition_penalty beside OpenAI's fields.

    Greedy by default, unlike OpenAI's temperature of 1, at which small models lose the thread.
    """

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field([], max_length=MAX_STOP_STRINGS)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name in UNSUPPORTED.keys() & data.keys() if isinstance(data, dict) else ():
            if data[name] is not None and data[name] not in UNSUPPORTED[name]:
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return data

    @classmethod
    def parse(cls, body: bytes) -> "ChatCompletionRequest":
        """The request in a JSON body; APIError 400 names the first field that is wrong."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            field = ".".join(str(step) for step in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise APIError(400, f"{field}: {message}" if field else message, param=field or None) from None

    def sampling_params(self) -> list[SamplingParams]:
        """One for each of n sequences. With a seed each has its own, and the first is that of n=1."""
        names = [name for name in SamplingParams.__dataclass_fields__ if name != "seed"]
        options = {name: getattr(self, name) for name in names}
        try:
            first = SamplingParams(**options, seed=self.seed)
            seeds = [None if self.seed is None else (self.seed + i) % 2**63 for i in range(1, self.n)]
            return [first, *(SamplingParams(**options, seed=seed) for seed in seeds)]
        except InputError as error:  # it begins with name=value
            raise APIError(400, str(error), param=str(error).partition("=")[0]) from None


class CompletionFormat:
    """Formats the responses to one request: they share an id, the model's name and the time of creation."""

    def __init__(self, request_id: str, model: str):
        self.base = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}

    def response(self, texts: list[str], finish_reasons: list[str | None], usage: dict[str, int]) -> dict[str, Any]:
        """The whole response of a request that is not streamed."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "finish_reason": finish_reason,
                "logprobs": None,
            }
            for index, (text, finish_reason) in enumerate(zip(texts, finish_reasons))
        ]
        return self.base | {"object": "chat.completion", "choices": choices, "usage": usage}

    def chunk(self, index: int, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        """One event of a streamed response."""
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return self.base | {"object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last event of a streamed response that reports its usage."""
        return self.base | {"object": "chat.completion.chunk", "choices": [], "usage": usage}


def format_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Prompt tokens, image tokens included, counted once for all n; and generated tokens, end tokens included."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
