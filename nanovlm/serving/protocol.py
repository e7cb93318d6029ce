"""What is asked and what is said, as the OpenAI client library speaks it."""

import time
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from models.decoding import SamplingParams

MAX_MESSAGES = 1000
MAX_ANSWERS = 16  # n
MAX_STOPS = 4
NEUTRAL = {  # what would change the answer and is not done here, with the values that ask for nothing
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


class Problem(Exception):
    """Why there is no answer: an HTTP status and a sentence, in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, headers: dict | None = None
    ):
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers

    def body(self) -> dict:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Strict(BaseModel):
    """A number is no string, and null is as good as nothing."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given):
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class ImageURL(Strict):
    url: str


class Text(Strict):
    type: Literal["text"]
    text: str


class Image(Strict):
    type: Literal["image_url"]
    image_url: Annotated[ImageURL, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)]


Part = Annotated[Text | Image, Field(discriminator="type")]


def _as_parts(content):
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], BeforeValidator(_as_parts)]

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def urls(self) -> list[str]:
        return [part.image_url.url for part in self.content if isinstance(part, Image)]


class StreamOptions(Strict):
    include_usage: bool = False


class ChatRequest(Strict):
    """A chat completion that is asked for; beside OpenAI's fields vLLM's top_k, min_p and repetition_penalty.

    Greedy unless a temperature is given: OpenAI's default of 1 would make small models wander.
    """

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)] = Field(
        [], max_length=MAX_STOPS
    )
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_done(cls, given):
        for name in NEUTRAL.keys() & given.keys() if isinstance(given, dict) else ():
            if given[name] is not None and given[name] not in NEUTRAL[name]:
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return given

    @classmethod
    def read(cls, body: bytes) -> "ChatRequest":
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise Problem(400, *_sentence(error)) from None

    def samplings(self) -> list[SamplingParams]:
        """One for each of n answers; with a seed each has its own, and the first is what n=1 says."""
        names = [name for name in SamplingParams.__dataclass_fields__ if name != "seed"]
        options = {name: getattr(self, name) for name in names}
        try:
            first = SamplingParams(**options, seed=self.seed)
            seeds = [None if self.seed is None else (self.seed + i) % 2**63 for i in range(self.n)]
            return [first, *(SamplingParams(**options, seed=seed) for seed in seeds[1:])]
        except ValueError as error:
            raise Problem(400, str(error), param=str(error).partition("=")[0]) from None


def _sentence(error: ValidationError) -> tuple[str, None, str | None]:
    """The first thing that is wrong, and where."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(step) for step in first["loc"])
    words = first["msg"].removeprefix("Value error, ")
    return (f"{place}: {words}" if place else words), None, place or None


class Completion:
    """The frame of one answer: its id, its model and when it began."""

    def __init__(self, number: str, model: str):
        self.frame = {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": model}

    def whole(self, texts: list[str], finished: list[str], usage: dict) -> dict:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "finish_reason": reason,
                "logprobs": None,
            }
            for index, (text, reason) in enumerate(zip(texts, finished))
        ]
        return self.frame | {"object": "chat.completion", "choices": choices, "usage": usage}

    def piece(self, index: int, delta: dict, finished: str | None = None) -> dict:
        choice = {"index": index, "delta": delta, "finish_reason": finished, "logprobs": None}
        return self.frame | {"object": "chat.completion.chunk", "choices": [choice]}

    def last(self, usage: dict) -> dict:
        return self.frame | {"object": "chat.completion.chunk", "choices": [], "usage": usage}


def usage(prompt_tokens: int, completion_tokens: int) -> dict:
    """Tokens read, pictures included, once for all answers; and tokens said, end tokens included."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
