"""Choices: scored together from one prefill, each exactly as alone without a cache."""

import pytest
import torch

from nanovlm import SAMPLE
from nanovlm.errors import InputError

CHOICES = ["A large green ring", "blue", "A", "a much longer answer than all the others"]


def test_each_choice_is_scored_as_alone_without_a_cache(random_captioner):
    captioner, model, prompt = random_captioner, random_captioner.model, "What is it?"
    request, tokenizer = captioner.request(SAMPLE, prompt), captioner.tokenizer
    images, scores = torch.cat([image.tiles for image in request.images]), {}
    for choice in CHOICES:
        answer = tokenizer.encode(tokenizer.answer_prefix + choice)
        total = 0.0
        for i in range(len(answer) + 1):
            logits, _ = model.prefill(torch.tensor([[*request.ids, *answer[:i]]]), images)
            log_probabilities = logits[0].double().log_softmax(-1)
            wanted = answer[i : i + 1] or list(tokenizer.eos_token_ids)
            total += log_probabilities[wanted].logsumexp(0).item()
        scores[choice] = total
    ranked = captioner.classify(SAMPLE, CHOICES, prompt)
    assert {one.text: one.log_probability for one in ranked} == pytest.approx(scores, abs=1e-3)
    assert [one.text for one in ranked] == sorted(scores, key=lambda choice: -scores[choice])
    assert sum(one.probability for one in ranked) == pytest.approx(1)


@pytest.mark.parametrize("choices", ["red", ["red"], ["red", "red"], ["red", " "]])
def test_choices_are_two_or_more(random_captioner, choices):
    with pytest.raises(InputError, match="name two or more"):
        random_captioner.classify(SAMPLE, choices)
