"""A request of a continuous batch and what it puts out."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

from models.decoding import SamplingParams, TokenSampler
from models.errors import NanoVLMError
from models.inference.inference_model import Network
from models.inference.serving_caches import CachedPrefix, ImageStarts, TiledImage

# The ids generated so far, logits (1, vocabulary) -> logits. A method forced_tokens, if there is one, gives the ids
# that alone can follow those generated so far.
LogitsProcessor = Callable[[list[int], Tensor], Tensor]


@dataclass(frozen=True)
class TokenOutput:
    """The next token of a request, with its `finish_reason` if it is the last, or "error"."""

    key: Hashable
    token_id: int
    finished: str | None = None
    error: Exception | None = None  # why the request failed; token_id is then -1
    n_cached: int = 0  # tokens of the prompt that the prefix cache held


class PrefillError(NanoVLMError, RuntimeError):
    """A prompt could not be prefilled, for example for lack of memory. It is dropped; other requests are unaffected."""

    def __init__(self, key: Hashable, error: Exception):
        super().__init__(str(error) or type(error).__name__)
        self.key = key


@dataclass(eq=False)
class BatchRequest:
    """A prompt and the state of its generation."""

    key: Hashable
    input_ids: Tensor  # (T,), on the CPU
    images: list[TiledImage]  # empty once they are prefilled
    image_starts: ImageStarts
    remaining: int  # tokens that may still be generated
    sampling: SamplingParams
    forced_tokens: Callable[[list[int]], list[int]] | None = None
    sampler: TokenSampler | None = None  # None for the most likely token, which is found for all such requests together
    prefix: CachedPrefix | None = None  # that begins like the prompt
    prefix_length: int = 0
    network: Network | None = None  # of the model when the prompt was prefilled
    length: int = 0  # tokens of it in its cache slot
    output: list[int] = field(default_factory=list)

    @property
    def unread(self) -> list[int]:
        """The tokens of the output that are not yet in the cache: the last one, and forced ones before it."""
        return self.output[self.length - len(self.input_ids) :]
