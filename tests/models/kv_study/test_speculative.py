"""Speculative decoding yields what plain greedy decoding yields, whatever is guessed."""

import random
from dataclasses import replace

import pytest
import torch

from models.kv_study.speculative import DraftModel, prompt_lookup, read_lm, read_vlm, speculate
from models.language_model import LanguageModel
from models.vision_language_model import PrefillState
from support import randomize

N = 24


def oracle(ids, expected, wrong_at):
    """The right ids, with a wrong one now and then."""

    def guess(so_far):
        right = expected[len(so_far) - len(ids) :][:5]
        return [(token + 1) % 40 if random.Random(len(so_far) + i).random() < wrong_at else token
                for i, token in enumerate(right)]  # fmt: skip

    return guess


@pytest.fixture
def draft(tiny_config):
    torch.manual_seed(5)
    return randomize(LanguageModel(tiny_config(lm_use_tokens=True, lm_n_blocks=1))).eval()


@pytest.mark.parametrize("kind", ["lookup", "draft", "itself", "right", "mixed", "wrong", "nothing"])
def test_ids_are_those_of_plain_greedy_decoding(tiny_model, draft, kind):
    for seed in range(4):
        model = tiny_model(seed)
        torch.manual_seed(seed)
        prompt = torch.randint(4, 40, (1, 12))
        prompt[0, :4] = 3
        images = torch.rand(1, 3, 16, 16)
        expected = model.generate(prompt, images, max_new_tokens=N)[0].tolist()
        for eos in (-1, expected[N // 2]):
            plain = expected[: expected.index(eos) + 1] if eos in expected else expected
            ids = prompt[0].tolist()
            share = {"right": 0, "mixed": 0.3, "wrong": 1}.get(kind)
            guess = {"lookup": prompt_lookup, "draft": DraftModel(draft), "nothing": lambda ids: []}.get(kind)
            if kind == "itself":  # without the image
                twin = LanguageModel(replace(model.cfg, lm_use_tokens=True)).eval()
                twin.load_state_dict(model.decoder.state_dict())
                guess = DraftModel(twin)
            guess = guess or oracle(ids, expected, share)
            steps = speculate(*model.prefill(prompt, images), read_vlm(model), guess, ids, N, eos)
            assert [token for step in steps for token in step] == plain
            if kind == "right":
                assert all(len(step) == 6 for step in steps[1:-1]), "five guesses and the model's own token"
            if kind in ("wrong", "nothing"):
                assert all(len(step) == 1 for step in steps)


def test_a_draft_is_the_small_models_greedy_continuation_after_going_back(draft):
    guess = DraftModel(draft, 4)
    for ids in ([5, 6, 7], [5, 6, 7, 8], [5, 6, 9, 9, 9], [11, 12], [11, 12, *[13] * 10]):
        expected = list(ids)
        for _ in range(4):
            expected.append(int(draft(torch.tensor([expected]))[0][0, -1].argmax()))
        assert guess(ids) == expected[len(ids) :]
    assert len(guess([4] * 62)) == 2, "of 64 positions"
    guess([5, 6])
    too_long = [5, *[4] * 69]
    assert (guess(too_long), len(guess(too_long[:20]))) == ([], 4), "what is too long is not read"
    logits, kv_cache = draft(torch.tensor([[5, 6]]))
    answer = speculate(logits[:, -1], PrefillState(kv_cache), read_lm(draft), DraftModel(draft), [5, 6], 13, -1)
    assert [len(step) for step in answer] == [1, 6, 6], "a model drafts for itself without a mistake"


def test_lookup_returns_what_followed_the_longest_latest_match():
    assert prompt_lookup([1, 2, 3, 9, 8, 2, 3, 7, 7, 1, 2, 3], 2) == [9, 8], "three tokens before two"
    assert prompt_lookup([5, 2, 3, 9, 8, 2, 3, 7, 7, 1, 2, 3], 2) == [7, 7], "the latest of two"
    assert prompt_lookup([1, 2, 1, 2], 0) == [] and prompt_lookup([1, 2, 1, 2]) == [1, 2, 1, 2, 1]
    assert prompt_lookup([1, 2, 3]) == prompt_lookup([1]) == []
