"""The most probable of given answers: each is scored from one prefill, whose keys and values all of them continue."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanovlm.errors import InputError

if TYPE_CHECKING:
    from nanovlm.captioner import Captioner


@dataclass(frozen=True)
class Choice:
    """A possible answer and how probable the model finds it."""

    text: str
    probability: float  # among the choices: all of them add up to 1
    log_probability: float  # among all answers, the end included: if it is low for all, none of them fits

    def columns(self) -> dict[str, float]:
        """The numbers as a table has them."""
        return {"probability": round(self.probability, 4), "log_probability": round(self.log_probability, 3)}


@torch.inference_mode()
def rank_choices(captioner: "Captioner", image: Any, choices: Sequence[str], prompt: str) -> list[Choice]:
    """The choices as answers to a prompt about an image, the most probable first."""
    if isinstance(choices, str) or len(set(choices)) < 2 or not all(map(str.strip, choices)):
        raise InputError(f"choices={choices!r}: name two or more answers, such as red,green")
    tokenizer = captioner.tokenizer
    model = captioner.inference
    ends = list(tokenizer.eos_token_ids)
    encoded = [tokenizer.encode(tokenizer.answer_prefix + choice) for choice in choices]
    answers = [[*([token_id] for token_id in ids), ends] for ids in encoded]  # the ids of each step: any end is one
    n_steps = max(map(len, answers))
    request = captioner.request(image, prompt, max_new_tokens=n_steps)
    tiles = [one.tiles for one in request.images if one.tiles is not None]
    images = torch.cat(tiles).to(model.device) if tiles else None
    logits, state = model.prefill(torch.tensor([request.ids], device=model.device), images)
    state = state.rows(torch.zeros(len(answers), dtype=torch.long, device=model.device))
    logits = logits.expand(len(answers), -1)
    totals = torch.zeros(len(answers), dtype=torch.float64)
    for step in range(n_steps):
        if step:  # an answer that has ended is continued by anything
            chosen = torch.tensor([answer[min(step, len(answer)) - 1][0] for answer in answers], device=model.device)
            logits, state = model.decode(chosen, state)
        log_probabilities = logits.double().cpu().log_softmax(-1)
        for i, answer in enumerate(answers):
            totals[i] += log_probabilities[i, answer[step]].logsumexp(0) if step < len(answer) else 0
    ranked = zip(choices, totals.softmax(0).tolist(), totals.tolist())
    return sorted((Choice(*one) for one in ranked), key=lambda choice: -choice.log_probability)
