"""Choices: scored together from one prefill of their image, each exactly as alone without a cache."""

import pytest
import torch

from nanovlm import SAMPLE
from nanovlm.bulk import caption_rows
from nanovlm.errors import ImageError, InputError
from nanovlm.options import CaptionOptions
from support import noise_image, watch

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


@pytest.mark.parametrize("batch_size", [1, 7])
def test_many_images_are_scored_together_and_each_is_read_once(random_captioner, batch_size):
    images, captioner = [noise_image(seed=seed) for seed in range(5)], random_captioner
    expected = [captioner.classify(image, CHOICES)[0] for image in images]
    n_prompt = len(captioner.request(images[0]).ids)
    with watch(captioner.model.vision_encoder) as tiles, watch(captioner.model.decoder) as shapes:
        options = CaptionOptions(choices=tuple(CHOICES))
        rows = list(caption_rows(captioner, [(str(i), image) for i, image in enumerate(images)], options, batch_size))
        ranked = list(captioner.classify_each(images, CHOICES, batch_size=batch_size))
    assert [row["text"] for row in rows] == [one[0].text for one in ranked] == [best.text for best in expected]
    for row, best in zip(rows, expected):
        assert (row["probability"], row["log_probability"]) == pytest.approx(tuple(best.columns().values()), abs=1e-3)
    assert sum(n for n, *_ in tiles) == 2 * len(images)
    assert sum(rows for rows, n, *_ in shapes if n >= n_prompt - 1) == 2 * len(images)


def test_an_image_that_fails_fails_alone(random_captioner):
    options = CaptionOptions(choices=("red", "green"))
    images = [("absent.png", "absent.png"), ("a", noise_image())]
    failed, row = caption_rows(random_captioner, images, options)
    assert isinstance(failed, ImageError) and [row] == list(caption_rows(random_captioner, images[1:], options))


@pytest.mark.parametrize("choices", ["red", ["red"], ["red", "red"], ["red", " "]])
def test_choices_are_two_or_more(random_captioner, choices):
    with pytest.raises(InputError, match="name two or more"):
        random_captioner.classify(SAMPLE, choices)
