"""From a prompt to tokens: embeddings and prefill, sampling, and the one generation loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.cache import PrefillState
from models.common.errors import InputError
from models.common.options import GREEDY, MAX_NEW_TOKENS, RepetitionDetection, SamplingParams
from models.config import VLMConfig


def choose_tokens(logits: Tensor, sampling: SamplingParams, generator: torch.Generator | None = None) -> Tensor:
    """Ids (B,) from logits (B, vocabulary), by the temperature and filters of sampling; without its penalties."""
    if sampling.temperature == 0:
        return logits.float().argmax(-1)  # over bfloat16 a CPU takes five times as long
    logits = logits.float() / sampling.temperature
    if sampling.top_k and sampling.top_k < logits.size(-1):
        logits, ids = logits.topk(sampling.top_k)
    elif sampling.top_p < 1 or sampling.min_p:
        logits, ids = logits.sort(descending=True, stable=True)
    else:  # no filter, so no sorting
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    probs = logits.softmax(-1)
    dropped = probs < sampling.min_p * probs[:, :1]
    if sampling.top_p < 1:  # at 1, rounding of the sum would drop the least likely
        dropped |= probs.cumsum(-1) - probs >= sampling.top_p
    chosen = torch.multinomial(probs.masked_fill(dropped, 0.0), 1, generator=generator)
    return ids.gather(-1, chosen).squeeze(-1)


class TokenSampler:
    """Chooses the next token of each row of a batch, and remembers the tokens for penalties.

    prompt (B, T) holds the ids that the repetition penalty counts beside the chosen ones; negative ids do not count. Of
    several end tokens the first stands for all. logits_processor changes the logits (B, vocabulary) before all else.
    """

    def __init__(
        self,
        sampling: SamplingParams = GREEDY,
        eos_token_id: int | Sequence[int] | None = None,
        prompt: Tensor | None = None,
        logits_processor: Callable[[Tensor], Tensor] | None = None,
    ):
        self.sampling = sampling
        self.logits_processor = logits_processor
        ends: list[Any] = list(eos_token_id) if isinstance(eos_token_id, Sequence) else [eos_token_id]
        self.eos_token_id, *self._other_ends = ends or [None]
        self._generator: torch.Generator | None = None  # None is torch's global one
        self._prompt = prompt
        self._seen: Tensor | None = None  # (B, vocabulary) bool: in the prompt
        self._counts: Tensor | None = None  # (B, vocabulary): how often in the output

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits (B, vocabulary) -> ids (B,)."""
        if self._generator is None and self.sampling.seed is not None:
            self._generator = torch.Generator(logits.device).manual_seed(int(self.sampling.seed))
        if self.logits_processor is not None:
            logits = self.logits_processor(logits)
        if self.sampling.counts_output:
            logits = self._penalize(logits)
        ids = choose_tokens(logits, self.sampling, self._generator)
        if self._counts is not None:
            self._counts[torch.arange(len(ids), device=ids.device), ids] += 1
        for end in self._other_ends:
            ids = ids.masked_fill(ids == end, self.eos_token_id)
        return ids

    def _penalize(self, logits: Tensor) -> Tensor:
        """Logits after repetition, frequency and presence penalty."""
        sampling = self.sampling
        rows, vocabulary = logits.shape
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros_like(logits, dtype=torch.float32)
            seen = logits.new_zeros(rows, vocabulary + 1, dtype=torch.bool)  # the last column is that of negative ids
            if self._prompt is not None:
                seen.scatter_(1, self._prompt.masked_fill(self._prompt < 0, vocabulary).to(seen.device), True)
            self._seen = seen[:, :-1]
        used = self._counts > 0
        if (penalty := sampling.repetition_penalty) != 1:
            penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self._seen | used, penalized, logits)
        if sampling.frequency_penalty or sampling.presence_penalty:
            logits = logits - sampling.frequency_penalty * self._counts - sampling.presence_penalty * used
        return logits


def trim_repetition(ids: Sequence[int], detection: RepetitionDetection) -> Sequence[int]:
    """The ids up to the first of the cycles that they end with, if these are repeated as `detection` says; else all."""
    shortest, longest, count = detection
    for n in range(shortest, min(longest, len(ids) // count) + 1 if count else 0):
        if ids[-1] != ids[-1 - n]:  # nearly always
            continue
        tail = ids[-n * count :]
        if tail[n:] == tail[:-n]:
            cycle = next(k for k in range(1, n + 1) if tail[k:] == tail[:-k])  # one of 8 may be one of 2 four times
            start = len(ids) - len(tail)
            while start and ids[start - 1] == ids[start - 1 + cycle]:
                start -= 1
            return ids[: start + cycle]
    return ids


def finish_reason(ids: Sequence[int], eos_token_id: int | None, detection: RepetitionDetection) -> str:
    """Why an answer ended: "repetition", "stop" if its end token is among the ids, else "length"."""
    answer = ids[: ids.index(eos_token_id)] if eos_token_id in ids else ids
    if len(trim_repetition(answer, detection)) < len(answer):
        return "repetition"
    return "stop" if len(answer) < len(ids) else "length"


def validate_counts(max_new_tokens: int, n_samples: int) -> None:
    """Raise InputError for a negative number of tokens, or less than one sample."""
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens={max_new_tokens} is negative; ask for 0 or more")
    if n_samples < 1:
        raise InputError(f"n_samples={n_samples} is less than 1")


def generate_tokens(
    logits: Tensor, step: Callable[[Tensor], Tensor], sampler: TokenSampler, max_new_tokens: int
) -> Iterator[Tensor]:
    """The generation loop: choose ids (B,) from logits (B, vocabulary), yield them, get the next logits of step(ids).

    It ends after max_new_tokens, or when every row has produced its end token or repeats itself; a finished row then
    has end tokens only, if there is one. No step is computed whose logits are not used.
    """
    eos = sampler.eos_token_id
    detection = sampler.sampling.repetition_detection
    outputs: list[list[int]] = [[] for _ in logits]
    ended = torch.zeros(len(outputs), dtype=torch.bool, device=logits.device)
    for remaining in reversed(range(max_new_tokens)):
        ids = sampler(logits)
        if eos is not None:
            ids = ids.masked_fill(ended, eos)
            ended |= ids == eos
        yield ids
        if detection[2]:
            for row, (output, token_id) in enumerate(zip(outputs, ids.tolist())):
                output.append(token_id)
                ended[row] |= len(trim_repetition(output, detection)) < len(output)
        if not remaining or ((eos is not None or detection[2]) and ended.all()):
            return
        logits = step(ids)


def collect_tokens(stream: Iterable[Tensor], n_rows: int, like: Tensor) -> Tensor:
    """All that a stream of (n_rows,) ids yields, (n_rows, T_new); like gives dtype and device if it yields nothing."""
    columns = list(stream)
    return torch.stack(columns, dim=1) if columns else like.new_empty(n_rows, 0)


class GenerationMixin(ABC):
    """From a prompt to tokens, for a model with a config and three methods, as `VisionLanguageModel` describes them."""

    cfg: VLMConfig
    image_token_id: int

    @abstractmethod
    def encode_images(self, images: Tensor) -> Tensor: ...

    @abstractmethod
    def embed_tokens(self, input_ids: Tensor) -> Tensor: ...

    @abstractmethod
    def prefill_embeds(
        self, embeds: Tensor, attention_mask: Tensor | None = None, prefix: PrefillState | None = None
    ) -> tuple[Tensor, PrefillState]: ...

    def embed(self, input_ids: Tensor, images: Tensor | None = None) -> Tensor:
        """Embeddings (B, T, C) of ids (B, T); images (N, 3, S, S) replace image tokens in reading order."""
        self.validate_images(input_ids, images)
        image_embeds = None if images is None or not len(images) else self.encode_images(images).flatten(0, 1)
        return self.embed_encoded(input_ids, image_embeds)

    def embed_encoded(self, input_ids: Tensor, image_embeds: Tensor | None) -> Tensor:
        """Embeddings (B, T, C) of ids (B, T); the rows of image_embeds (n, C) replace the n image tokens in order."""
        is_image = input_ids == self.image_token_id
        x = self.embed_tokens(input_ids.masked_fill(is_image, 0))  # any id will do there
        return x if image_embeds is None else x.masked_scatter(is_image[..., None], image_embeds.to(x.dtype))

    def prefill(
        self,
        input_ids: Tensor,
        images: Tensor | None = None,
        attention_mask: Tensor | None = None,
        prefix: PrefillState | None = None,
    ) -> tuple[Tensor, PrefillState]:
        """Process a prompt, ids (B, T), after an optional prefix: last logits (B, vocabulary) and the new prefix.

        attention_mask (B, T) is 0 at padding, which is on the left. The given prefix can be continued again.
        """
        if attention_mask is not None and attention_mask.shape == input_ids.shape and bool((attention_mask == 1).all()):
            attention_mask = None
        return self.prefill_embeds(self.embed(input_ids, images), attention_mask, prefix)

    def decode(self, ids: Tensor, prefix: PrefillState) -> tuple[Tensor, PrefillState]:
        """Append one token per row, ids (B,): next logits (B, vocabulary) and the longer prefix."""
        return self.prefill_embeds(self.embed_tokens(ids[:, None]), None, prefix)

    @torch.inference_mode()
    def stream(
        self,
        input_ids: Tensor,
        images: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: SamplingParams = GREEDY,
        eos_token_id: int | Sequence[int] | None = None,
        n_samples: int = 1,
        prefix: PrefillState | None = None,
        use_kv_cache: bool = True,
        logits_processor: Callable[[Tensor], Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """Yield token ids, (B * n_samples,), as they are chosen; the samples of a prompt are neighbors.

        A prompt is prefilled once, however many samples continue it. A prefix holds the first prefix.length ids
        already, whose images are then not passed. use_kv_cache=False computes everything again for every token: the
        reference for the cache. logits_processor changes the logits (B * n_samples, vocabulary) before each choice.
        """
        validate_counts(max_new_tokens, n_samples)
        self.cfg.validate_length(input_ids.size(1), max_new_tokens)
        if max_new_tokens == 0:
            return
        rows = torch.arange(len(input_ids), device=input_ids.device).repeat_interleave(n_samples)
        if use_kv_cache:
            past = 0 if prefix is None else prefix.length
            mask = None if attention_mask is None else attention_mask[:, past:]
            logits, state = self.prefill(input_ids[:, past:], images, mask, prefix)
            if n_samples > 1:
                logits = logits[rows]
                state = state.rows(rows)
        else:
            embeds = self.embed(input_ids, images)[rows]
            mask = None if attention_mask is None else attention_mask[rows]
            logits, _ = self.prefill_embeds(embeds, mask)

        def step(ids: Tensor) -> Tensor:
            """The logits (B * n_samples, vocabulary) after one more token per row."""
            nonlocal state, embeds, mask
            if use_kv_cache:
                logits, state = self.decode(ids, state)
                return logits
            embeds = torch.cat([embeds, self.embed_tokens(ids[:, None])], dim=1)
            mask = None if mask is None else F.pad(mask, (0, 1), value=1)
            return self.prefill_embeds(embeds, mask)[0]

        counted = input_ids != self.image_token_id
        if attention_mask is not None:
            counted &= attention_mask != 0
        sampler = TokenSampler(sampling, eos_token_id, input_ids.masked_fill(~counted, -1)[rows], logits_processor)
        yield from generate_tokens(logits, step, sampler, max_new_tokens)

    def generate(self, input_ids: Tensor, *args: Any, **options: Any) -> Tensor:
        """All that `stream` yields with the same arguments, (B * n_samples, T_new)."""
        n_rows = len(input_ids) * options.get("n_samples", 1)
        return collect_tokens(self.stream(input_ids, *args, **options), n_rows, input_ids)

    def validate_images(self, input_ids: Tensor, images: Tensor | None) -> None:
        """Raise InputError unless images (N, 3, S, S) are floats, as many as ids (..., T) have image tokens for."""
        if images is not None and not images.is_floating_point():
            raise InputError(f"images are of {images.dtype}, not floats; normalize them as the model's processor does")
        wanted = int((input_ids == self.image_token_id).sum())
        given = 0 if images is None else len(images) * self.cfg.mp_image_token_length
        if wanted != given:
            raise InputError(
                f"the prompt holds {wanted} image tokens, but the images give {given} embeddings; pass its images"
            )
