"""The most probable of given answers: each is a request that forces its tokens and adds up how probable they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.common.options import GREEDY
from models.inference.continuous_batching import Request
from nanovlm.errors import InputError
from nanovlm.processing.tokenizer import Tokenizer


@dataclass(frozen=True)
class Choice:
    """A possible answer and how probable the model finds it."""

    text: str
    probability: float  # among the choices: all of them add up to 1
    log_probability: float  # among all answers, the end included: if it is low for all, none of them fits

    def columns(self) -> dict[str, float]:
        """The numbers as a table has them."""
        return {"probability": round(self.probability, 4), "log_probability": round(self.log_probability, 3)}


class ForcedAnswer:
    """A grammar of one answer; `log_probability` is that of the tokens so far.

    first is shared by the answers to one prompt: the log-probabilities (vocabulary,) of their first token, as whichever
    of them is computed first has them. With quantized weights another computation would round otherwise.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, first: list[Tensor]):
        self.text = text
        self.first = first
        ids = tokenizer.encode(tokenizer.answer_prefix + text)
        self.steps = [*([token_id] for token_id in ids), list(tokenizer.eos_token_ids)]  # any end is one
        self.log_probability = 0.0

    def __call__(self, output: list[int], logits: Tensor) -> Tensor:
        allowed = self.steps[len(output)]
        log_probabilities = self.first[0] if self.first and not output else logits[0].double().cpu().log_softmax(-1)
        if not self.first:
            self.first.append(log_probabilities)
        self.log_probability += log_probabilities[allowed].logsumexp(0).item()
        forced = torch.full_like(logits, -torch.inf)
        forced[:, allowed[0]] = 0
        return forced


def forced_answers(choices: Sequence[str], tokenizer: Tokenizer) -> list[ForcedAnswer]:
    """A grammar for each choice; InputError unless there are two or more."""
    if isinstance(choices, str) or len(set(choices)) < 2 or not all(map(str.strip, choices)):
        raise InputError(f"{choices!r}: name two or more answers, such as red,green", field="choices")
    first: list[Tensor] = []
    return [ForcedAnswer(choice, tokenizer, first) for choice in choices]


def score_requests(request: Request, answers: Sequence[ForcedAnswer]) -> list[Request]:
    """A request for each answer to the prompt of one, which the batch then computes once."""
    return [
        replace(request, sampling=GREEDY, max_new_tokens=len(answer.steps), grammar=answer, output=[])
        for answer in answers
    ]


def ranked_choices(requests: Sequence[Request]) -> list[Choice]:
    """The choices of requests that have ended, the most probable first. Raises their errors."""
    for request in requests:
        if request.error is not None:
            raise request.error
    answers = [request.grammar for request in requests if isinstance(request.grammar, ForcedAnswer)]
    log_probabilities = torch.tensor([answer.log_probability for answer in answers], dtype=torch.float64)
    shares = log_probabilities.softmax(0).tolist()
    ranked = [Choice(answer.text, share, answer.log_probability) for answer, share in zip(answers, shares)]
    return sorted(ranked, key=lambda choice: -choice.log_probability)
