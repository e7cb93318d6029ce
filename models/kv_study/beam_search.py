"""Beam search on a cache: keep the n most likely sequences, and choose among them by likelihood per length.

The rules are those of openai/whisper's decoding.py (BeamSearchDecoder with patience 1, MaximumLikelihoodRanker). At
each step all continuations of all beams are sorted by their log-probability; those that end before n others are found
are finished, and the n others are the next beams. The search ends when n sequences are finished. The beams of the next
step may continue any beam of this one, several of them the same: the cache must follow, which is what `rows(index)`
is for (Whisper: rearrange_kv_cache).

Greedy search is n_beams=1. A plain sum of log-probabilities favors short sequences, so it is divided by the length, or
by ((5 + length) / 6) ^ length_penalty, which is GNMT's (Wu et al. 2016, equation 14; they use 0.6 to 0.7).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.common.errors import InputError
from models.kv_study.encoder_decoder import Seq2SeqModel
from models.vision_language_model import VisionLanguageModel

Model = VisionLanguageModel | Seq2SeqModel
Step = Callable[[Tensor, Tensor], Tensor]  # ids (n,) and the rows (n,) they continue, to the next logits (n, V)


@dataclass(frozen=True)
class Hypothesis:
    """A sequence of new ids, without the end token, and the sum of their log-probabilities, end token included."""

    ids: tuple[int, ...]
    log_prob: float

    def score(self, length_penalty: float | None = None) -> float:
        """Log-probability over the length (1 if empty), or over ((5 + length) / 6) to the power of the penalty."""
        n = len(self.ids)
        return self.log_prob / (max(1, n) if length_penalty is None else ((5 + n) / 6) ** length_penalty)


def beam_search(
    logits: Tensor,
    step: Step,
    *,
    n_beams: int,
    max_new_tokens: int,
    eos_token_id: int | None = None,
    length_penalty: float | None = None,
) -> list[Hypothesis]:
    """The n_beams hypotheses with the highest scores, best first, for one prompt with next logits (1, V).

    Fewer are returned only where fewer sequences exist. Sequences that max_new_tokens cut off compete as they are.
    """
    if n_beams < 1 or max_new_tokens < 1:
        raise InputError(f"n_beams={n_beams} and max_new_tokens={max_new_tokens} must be 1 or more")
    beams = [Hypothesis((), 0.0)]
    finished = []
    for remaining in reversed(range(max_new_tokens)):
        past = torch.tensor([[beam.log_prob] for beam in beams], dtype=torch.float32, device=logits.device)
        sums = past + logits.float().log_softmax(-1)
        best = sums.flatten().topk(min(2 * n_beams, sums.numel()))  # at most n_beams of them end
        chosen = []
        sources = []
        for log_prob, at in zip(best.values.tolist(), best.indices.tolist()):
            source, token = divmod(at, logits.size(-1))
            if token == eos_token_id:
                finished.append(Hypothesis(beams[source].ids, log_prob))
            else:
                chosen.append(Hypothesis((*beams[source].ids, token), log_prob))
                sources.append(source)
            if len(chosen) == n_beams:
                break
        beams = chosen
        if len(finished) >= n_beams or not remaining or not beams:
            break
        ids = torch.tensor([beam.ids[-1] for beam in beams], device=logits.device)
        logits = step(ids, torch.tensor(sources, device=logits.device))
    candidates = finished[:n_beams]  # the first, as in Whisper
    candidates += beams[: n_beams - len(candidates)]
    return sorted(candidates, key=lambda hypothesis: hypothesis.score(length_penalty), reverse=True)


def cached_step(model: Model, state: Any) -> Step:
    """A step that selects the rows of the prefilled state and appends one token to each."""

    def step(ids: Tensor, rows: Tensor) -> Tensor:
        nonlocal state
        logits, state = model.decode(ids, state.rows(rows))
        return logits

    return step


@torch.inference_mode()
def generate(model: Model, input_ids: Tensor, images: Any = None, **options) -> list[Hypothesis]:
    """`beam_search` with these options after one prompt, ids (1, T), about its images."""
    logits, state = model.prefill(input_ids, images)
    return beam_search(logits, cached_step(model, state), **options)
