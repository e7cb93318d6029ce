"""From logits to tokens: how one is chosen, and the one loop that asks for the next."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import InputError


@dataclass(frozen=True)
class SamplingParams:
    """Chooses a token per row. The default is greedy; the filters apply in the order of the fields."""

    repetition_penalty: float = 1.0  # > 1 makes tokens that were read or said less likely (Keskar et al. 2019)
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest; 0 keeps all
    top_p: float = 1.0  # keep the likeliest that make up p (Holtzman et al. 2019); 1 keeps all
    min_p: float = 0.0  # keep those with at least min_p times the likeliest's probability (Nguyen et al. 2024)
    seed: int | None = None  # None draws from torch's own generator

    def __post_init__(self):
        for name, fits, limits in (
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
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
        else:  # nothing to leave out, so nothing to sort
            return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
        probs = logits.softmax(-1)
        dropped = probs < self.min_p * probs[:, :1]
        if self.top_p < 1:  # at 1 the sum's rounding would drop the unlikeliest
            dropped |= probs.cumsum(-1) - probs >= self.top_p
        dropped[:, 0] = False  # the likeliest always stays
        chosen = torch.multinomial(probs.masked_fill(dropped, 0.0), 1, generator=generator)
        return ids.gather(-1, chosen).squeeze(-1)

    def apply_repetition_penalty(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Make the tokens marked in seen (B, vocabulary) bool less likely."""
        penalised = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        return torch.where(seen, penalised, logits)


GREEDY = SamplingParams()


def token_presence_mask(ids: Tensor, vocabulary: int, counted: Tensor | None = None) -> Tensor:
    """Which tokens stand in ids (B, T), at the places where counted (B, T) bool is True: (B, vocabulary) bool."""
    if counted is not None:
        ids = ids.masked_fill(~counted, vocabulary)
    found = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, ids, True)[:, :vocabulary]


def check_counts(max_new_tokens: int, n_samples: int) -> None:
    """Raise ValueError for a generation of fewer than no tokens, or fewer than one sample."""
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative")
    if n_samples < 1:
        raise ValueError(f"n_samples={n_samples} is less than 1")


def generate_tokens(
    logits: Tensor,
    step: Callable[[Tensor], Tensor],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    eos_token_id: int | None = None,
    seen: Tensor | None = None,
) -> Iterator[Tensor]:
    """Choose from logits (B, vocabulary), yield ids (B,), ask step(ids) for the next logits, and so on.

    Ends after max_new_tokens or when every row has said eos_token_id; a row that has keeps saying it. No step
    is taken whose logits nobody needs. seen, (B, vocabulary) bool, marks what the repetition penalty finds said.
    """
    generator = None
    if sampling.seed is not None:
        generator = torch.Generator(logits.device).manual_seed(sampling.seed)
    if sampling.repetition_penalty != 1 and seen is None:
        seen = torch.zeros_like(logits, dtype=torch.bool)
    ended = torch.zeros(logits.size(0), dtype=torch.bool, device=logits.device)
    for remaining in reversed(range(max_new_tokens)):
        ids = sampling(logits if seen is None else sampling.apply_repetition_penalty(logits, seen), generator)
        if seen is not None:
            seen = seen.scatter(1, ids[:, None], True)
        if eos_token_id is not None:
            ids = ids.masked_fill(ended, eos_token_id)
            ended |= ids == eos_token_id
        yield ids
        if not remaining or (eos_token_id is not None and ended.all()):
            return
        logits = step(ids)
