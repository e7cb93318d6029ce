"""Speculative decoding: a cheap guess at the next tokens, which the model checks in one step, and a cache rolled back.

A step reads the last token and the guessed ones, which costs little more than one token where decoding is bound by
reading the weights. Guesses count up to the first that differs from the model's own choice, which is the step's last
token; `first(n)` rolls the cache back to the tokens that count. The output is the model's greedy output (Leviathan et
al. 2023; Chen et al. 2023); sampling needs their rejection rule.

A guess is a function from all ids so far to any number of ids that may follow:

- `prompt_lookup`: what followed the last time that the last few tokens occurred (Saxena 2023), for answers that copy.
- `DraftModel`: a small language model's greedy continuation, with a cache of its own that is rolled back likewise.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.cache import KVCache
from models.language_model import LanguageModel
from models.vision_language_model import PrefillState, VisionLanguageModel

MAX_GUESS = 5  # tokens
MAX_NGRAM = 3
Guess = Callable[[Sequence[int]], Sequence[int]]
Read = Callable[[Tensor, PrefillState], tuple[Tensor, PrefillState]]  # ids (1, T) to logits (T, V), all of them


def read_vlm(model: VisionLanguageModel) -> Read:
    def read(ids: Tensor, state: PrefillState) -> tuple[Tensor, PrefillState]:
        hidden, kv_cache = model.decoder(model.embed_tokens(ids), None, list(state.kv_cache), state.length)
        return model.decoder.head(hidden[0]), PrefillState(kv_cache)

    return read


def read_lm(decoder: LanguageModel) -> Read:
    """Of a language model with lm_use_tokens, from ids to logits."""

    def read(ids: Tensor, state: PrefillState) -> tuple[Tensor, PrefillState]:
        logits, kv_cache = decoder(ids, None, list(state.kv_cache), state.length)
        return logits[0], PrefillState(kv_cache)

    return read


def prompt_lookup(ids: Sequence[int], n: int = MAX_GUESS) -> list[int]:
    """The n ids after the latest earlier occurrence of the last 3 ids, else of the last 2, else of the last, if any.

    Where fewer than n follow, the copy goes on with its own beginning, as in LZ77: repetitions are guessed whole.
    """
    ids, given = list(ids), len(ids)
    for size in range(min(MAX_NGRAM, len(ids) - 1), 0, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:]:
                for i in range(start + size, start + size + n):
                    ids.append(ids[i])
                return ids[given:]
    return []


class DraftModel:
    """Guesses n tokens by a small language model with lm_use_tokens; one object guesses for one sequence at a time."""

    def __init__(self, decoder: LanguageModel, n: int = MAX_GUESS):
        self.decoder = decoder
        self.n = n
        self.ids: list[int] = []
        self.kv_cache: list[KVCache] = []

    def __call__(self, ids: Sequence[int]) -> list[int]:
        ids = list(ids)
        guessed = []
        pairs = zip(self.ids, ids[:-1])  # the last id is read again, for its logits
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.ids), len(ids) - 1))
        kv_cache = [kv.first(same) for kv in self.kv_cache] if same else None
        new = ids[same:]
        device = self.decoder.norm.weight.device
        for start in range(len(ids), min(len(ids) + self.n, self.decoder.cfg.lm_max_position_embeddings)):
            logits, kv_cache = self.decoder(torch.tensor([new], device=device), None, kv_cache, start - len(new))
            new = [int(logits[0, -1].argmax())]
            guessed += new
        if kv_cache and guessed:  # else the ids were not read
            self.ids = [*ids, *guessed[:-1]]
            self.kv_cache = kv_cache
        return guessed


@torch.inference_mode()
def speculate(
    logits: Tensor, state: PrefillState, read: Read, guess: Guess, prompt: Sequence[int], max_new_tokens: int, eos: int
) -> list[list[int]]:
    """The greedy answer to one prefilled prompt, logits (1, V) and state, as lists of the ids that each step yields.

    guess is given the prompt's ids and those generated. The first list is the token that the prefill chose.
    """
    steps = [[int(logits.argmax())]]
    ids = [*prompt, *steps[0]]
    while ids[-1] != eos and (left := max_new_tokens - (len(ids) - len(prompt))) > 0:
        guessed = list(guess(ids))[: left - 1]
        logits, longer = read(torch.tensor([[ids[-1], *guessed]], device=logits.device), state)
        chosen = logits.argmax(-1).tolist()
        right = next((i for i, (a, b) in enumerate(zip(guessed, chosen)) if a != b), len(guessed))
        chosen = chosen[: right + 1]
        if eos in chosen:
            chosen = chosen[: chosen.index(eos) + 1]
        state = longer.first(state.length + len(chosen))
        del longer  # so that a paged cache may write the rejected tokens' places again
        steps.append(chosen)
        ids += chosen
    return steps
