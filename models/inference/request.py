"""A request: a prompt, how to continue it, and the answer."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from models.decoding import TokenSampler
from models.inference.caches import TiledImage
from models.sampling import GREEDY, MAX_NEW_TOKENS, SamplingParams

# (ids generated so far, logits (1, vocabulary)) -> logits. An optional method forced_tokens(ids) returns the ids that
# alone can follow.
Grammar = Callable[[list[int], Tensor], Tensor]


@dataclass(eq=False)
class Request:
    """A prompt and its answer, which a `ContinuousBatch` fills in. It is used once."""

    ids: Sequence[int]
    images: Sequence[TiledImage] = ()  # in reading order; dropped when the request has ended
    sampling: SamplingParams = GREEDY  # its seed belongs to this request alone
    max_new_tokens: int = MAX_NEW_TOKENS
    grammar: Grammar | None = None
    name: Any = None  # of the caller
    error: Exception | None = None  # why there is no answer
    output: list[int] = field(default_factory=list)  # generated ids, the end token included
    finished: str | None = None  # stop, length, repetition, error or cancelled
    n_cached: int = 0  # tokens of the prompt that were not computed, as their keys and values were known
    # The rest belongs to the batch:
    starts: Sequence[tuple[Hashable, int]] = ()  # each image's key, and the position of its first token
    sampler: TokenSampler | None = None  # None for the most likely token, which all such requests choose together
    length: int = 0  # tokens in the KV cache

    def __post_init__(self) -> None:
        if self.error is not None:
            self.finished = "error"

    @property
    def tokens(self) -> list[int]:
        return [*self.ids, *self.output]

    @property
    def unread(self) -> list[int]:
        """The tokens of the output that are not yet in the KV cache: the last one, and forced ones before it."""
        return self.output[self.length - len(self.ids) :]


@dataclass(frozen=True)
class TokenOutput:
    """The next token of a request, or its error."""

    request: Request
    token_id: int  # -1 with an error
    finished: str | None = None  # why it was the last token
    error: Exception | None = None
