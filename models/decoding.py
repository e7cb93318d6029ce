"""From logits to tokens: sampling, and the one generation loop."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from models.errors import InputError


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits. The default is greedy; the filters apply in the order of the fields."""

    repetition_penalty: float = 1.0  # > 1 makes tokens of the prompt and the output less likely (Keskar et al. 2019)
    frequency_penalty: float = 0.0  # subtracted for each time a token is in the output (OpenAI); < 0 favours it
    presence_penalty: float = 0.0  # subtracted once from tokens in the output (OpenAI); < 0 favours them
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the most likely tokens of total probability p (Holtzman et al. 2019); 1 keeps all
    min_p: float = 0.0  # keep those with at least min_p times the highest probability (Nguyen et al. 2024)
    seed: int | None = None  # None uses torch's global generator

    def __post_init__(self):
        for name, fits, limits in (
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "in [0, 2^63)"),
        ):
            if not fits:
                raise InputError(f"{name}={getattr(self, name)} must be {limits}")

    def __call__(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Logits (B, vocabulary) -> ids (B,)."""
        if self.temperature == 0:
            return logits.float().argmax(-1)  # over bfloat16 a CPU takes five times as long
        logits = logits.float() / max(self.temperature, 1e-30)
        if self.top_k and self.top_k < logits.size(-1):
            logits, ids = logits.topk(self.top_k)
        elif self.top_p < 1 or self.min_p:
            logits, ids = logits.sort(descending=True, stable=True)
        else:  # no filter, so no sorting
            return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
        probs = logits.softmax(-1)
        dropped = probs < self.min_p * probs[:, :1]
        if self.top_p < 1:  # at 1, rounding of the sum would drop the least likely
            dropped |= probs.cumsum(-1) - probs >= self.top_p
        dropped[:, 0] = False  # the most likely token always stays
        chosen = torch.multinomial(probs.masked_fill(dropped, 0.0), 1, generator=generator)
        return ids.gather(-1, chosen).squeeze(-1)

    def apply_repetition_penalty(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Make the tokens marked in seen (B, vocabulary) bool less likely."""
        penalized = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        return torch.where(seen, penalized, logits)

    @property
    def counts_output(self) -> bool:
        """Whether `apply_output_penalties` changes anything."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    def apply_output_penalties(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Frequency and presence penalty; counts (B, vocabulary) says how often each token is in the output so far."""
        return logits - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)


GREEDY = SamplingParams()


def token_presence_mask(ids: Tensor, vocabulary: int, counted: Tensor | None = None) -> Tensor:
    """Which tokens occur in ids (B, T), at the positions where counted (B, T) bool is True: (B, vocabulary) bool."""
    if counted is not None:
        ids = ids.masked_fill(~counted, vocabulary)
    present = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return present.scatter_(1, ids, True)[:, :vocabulary]


def validate_counts(max_new_tokens: int, n_samples: int) -> None:
    """Raise InputError for a negative number of tokens, or less than one sample."""
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens={max_new_tokens} is negative")
    if n_samples < 1:
        raise InputError(f"n_samples={n_samples} is less than 1")


def split_end_tokens(eos_token_id: int | Sequence[int] | None) -> tuple[Any, Sequence[int]]:
    """The end token that is yielded, None without one, and the others that it stands for."""
    if isinstance(eos_token_id, Sequence):
        return (eos_token_id[0], eos_token_id[1:]) if eos_token_id else (None, ())
    return eos_token_id, ()


def generate_tokens(
    logits: Tensor,
    step: Callable[[Tensor], Tensor],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    seen: Tensor | None = None,
) -> Iterator[Tensor]:
    """The generation loop: choose ids (B,) from logits (B, vocabulary), yield them, get the next logits of step(ids).

    It ends after max_new_tokens, or when every row has produced eos_token_id; a finished row repeats it. Of several end
    tokens the first stands for all. No step is computed whose logits are not used. seen, (B, vocabulary) bool, marks
    tokens for the repetition penalty.
    """
    generator = None
    if sampling.seed is not None:
        generator = torch.Generator(logits.device).manual_seed(sampling.seed)
    if sampling.repetition_penalty != 1 and seen is None:
        seen = torch.zeros_like(logits, dtype=torch.bool)
    counts = torch.zeros_like(logits, dtype=torch.float32) if sampling.counts_output else None
    ended = torch.zeros(logits.size(0), dtype=torch.bool, device=logits.device)
    eos, other_ends = split_end_tokens(eos_token_id)
    for remaining in reversed(range(max_new_tokens)):
        if seen is not None:
            logits = sampling.apply_repetition_penalty(logits, seen)
        if counts is not None:
            logits = sampling.apply_output_penalties(logits, counts)
        ids = sampling(logits, generator)
        if seen is not None:
            seen = seen.scatter(1, ids[:, None], True)
        if counts is not None:
            counts[torch.arange(len(ids), device=ids.device), ids] += 1
        for end in other_ends:
            ids = ids.masked_fill(ids == end, eos)
        if eos is not None:
            ids = ids.masked_fill(ended, eos)
            ended |= ids == eos
        yield ids
        if not remaining or (eos is not None and ended.all()):
            return
        logits = step(ids)


class Decodable(Protocol):
    """What `stream_tokens` needs of a model; see `models.vision_language_model.VisionLanguageModel`."""

    @property
    def image_token_id(self) -> int: ...
    def embed(self, input_ids: Tensor, images: Tensor | None = None) -> Tensor: ...
    def embed_tokens(self, input_ids: Tensor) -> Tensor: ...
    def prefill(self, input_ids: Tensor, images: Tensor | None, attention_mask: Tensor | None, prefix: Any) -> Any: ...
    def prefill_embeds(self, embeds: Tensor, attention_mask: Tensor | None = None) -> Any: ...
    def decode(self, ids: Tensor, prefix: Any) -> Any: ...
    def validate_length(self, prompt: int, max_new_tokens: int) -> None: ...


@torch.inference_mode()
def stream_tokens(
    model: Decodable,
    input_ids: Tensor,
    images: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams = GREEDY,
    eos_token_id: int | Sequence[int] | None = None,
    n_samples: int = 1,
    shared_prefix_length: int = 0,
    use_kv_cache: bool = True,
) -> Iterator[Tensor]:
    """Yield token ids, (B * n_samples,), as they are chosen; the samples of a prompt are neighbors.

    A prompt is prefilled once, however many samples continue it. The first shared_prefix_length ids of the rows, if
    that many are equal and hold all images, are prefilled once for all rows. use_kv_cache=False computes everything
    again for every token: the reference for the cache.
    """
    validate_counts(max_new_tokens, n_samples)
    model.validate_length(input_ids.size(1), max_new_tokens)
    if max_new_tokens == 0:
        return
    rows = torch.arange(input_ids.size(0), device=input_ids.device).repeat_interleave(n_samples)
    begin = _begin_cached if use_kv_cache else _begin_uncached
    logits, step = begin(model, input_ids, images, attention_mask, rows, shared_prefix_length)
    seen = None
    if sampling.repetition_penalty != 1:
        counted = input_ids != model.image_token_id
        if attention_mask is not None:
            counted &= attention_mask != 0
        seen = token_presence_mask(input_ids, logits.size(-1), counted)[rows]
    yield from generate_tokens(
        logits, step, sampling=sampling, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, seen=seen
    )


def collect_tokens(stream: Iterable[Tensor], n_rows: int, like: Tensor) -> Tensor:
    """All that a stream of (n_rows,) ids yields, (n_rows, T_new); like gives dtype and device if it yields nothing."""
    columns = list(stream)
    return torch.stack(columns, dim=1) if columns else like.new_empty(n_rows, 0)


class GenerationMixin:
    """`stream` and `generate` for a model with the methods of `Decodable`."""

    def stream(
        self: Decodable,
        input_ids: Tensor,
        images: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams = GREEDY,
        eos_token_id: int | Sequence[int] | None = None,
        n_samples: int = 1,
        shared_prefix_length: int = 0,
        use_kv_cache: bool = True,
    ) -> Iterator[Tensor]:
        """Yield token ids, (B * n_samples,), as they are chosen; see `stream_tokens`."""
        return stream_tokens(
            self,
            input_ids,
            images,
            attention_mask,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos_token_id=eos_token_id,
            n_samples=n_samples,
            shared_prefix_length=shared_prefix_length,
            use_kv_cache=use_kv_cache,
        )

    def generate(self: Decodable, input_ids: Tensor, *args, **kwargs) -> Tensor:
        """All that `stream` yields with the same arguments, (B * n_samples, T_new)."""
        n_rows = len(input_ids) * kwargs.get("n_samples", 1)
        return collect_tokens(stream_tokens(self, input_ids, *args, **kwargs), n_rows, input_ids)


def _begin_cached(model: Decodable, input_ids, images, attention_mask, rows: Tensor, shared: int):
    """Prefill: the logits after the prompt, and a function from ids to the next logits that keeps the cache."""
    prefix = None
    if shared:
        _, prefix = model.prefill(input_ids[:1, :shared], images, None, None)
        prefix, images = prefix.rows(torch.zeros_like(input_ids[:, 0])), None
    own_mask = None if attention_mask is None else attention_mask[:, shared:]
    logits, prefix = model.prefill(input_ids[:, shared:], images, own_mask, prefix)
    if len(rows) > len(input_ids):
        logits, prefix = logits[rows], prefix.rows(rows)

    def step(ids: Tensor) -> Tensor:
        nonlocal prefix
        logits, prefix = model.decode(ids, prefix)
        return logits

    return logits, step


def _begin_uncached(model: Decodable, input_ids, images, attention_mask, rows: Tensor, shared: int):
    """The same without a cache: every step computes the whole sequence again."""
    if shared and images is not None:  # every row has them
        images = images.repeat(len(input_ids), 1, 1, 1)
    x = model.embed(input_ids, images)[rows]
    mask = None if attention_mask is None else attention_mask[rows]
    logits, _ = model.prefill_embeds(x, mask)

    def step(ids: Tensor) -> Tensor:
        nonlocal x, mask
        x = torch.cat([x, model.embed_tokens(ids[:, None])], dim=1)
        mask = None if mask is None else F.pad(mask, (0, 1), value=1)
        return model.prefill_embeds(x, mask)[0]

    return logits, step
