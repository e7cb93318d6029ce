"""The speculation table: tokens per step and identical answers, of a model that learned to repeat a digit."""

import re
from random import Random

import pytest
import torch

from eval.lib.speculation import doctags, measure_doctags, small_config, speculation, speculation_table, train_decoder
from models.kv_study.speculative import DraftModel, prompt_lookup, read_lm
from models.vision_language_model import PrefillState


def test_tokens_per_step_are_counted_after_the_prefill():
    rows = [([0, digit], [digit] * 12) for digit in range(1, 5)]
    model = train_decoder(rows, 80, small_config(5, 16, 2, 1))

    @torch.inference_mode()
    def prefill():
        logits, kv_cache = model(torch.tensor([[0, 3]]))
        return logits[:, -1], PrefillState(kv_cache)

    guesses = {"lookup": prompt_lookup, "itself": DraftModel(model, 3), "wrong": lambda ids: [0, 0]}
    results = speculation("repeat", [([0, 3], prefill)] * 2, read_lm(model), guesses, -1, 9)
    assert all(row.is_exact and row.answers == 2 and row.ms_per_token > 0 for row in results)
    assert [row.tokens_per_step for row in results] == [1, 4, 4, 1], "8 tokens: steps of 6 and 2, of 4 and 4"
    assert "2 of 2" in speculation_table("", results)


@pytest.mark.full
def test_guesses_on_doctags_count_as_on_the_text_itself():
    page, opened = doctags(rng := Random("doctags")), []
    for tag in re.findall(r"</?[a-z]\w+>", re.sub(r"<(fcel|nl|loc_\d+)>", "", "".join(page))):
        if tag.startswith("</"):
            assert opened.pop() == tag.replace("/", "")
        else:
            opened.append(tag)
    assert not opened, "every tag is closed, in order"
    tokens = steps = 0
    for text in (page, doctags(rng)):
        done = 2  # the prefill chose one
        while done < len(text):
            guess, right = prompt_lookup(text[:done]), 0
            while right < len(guess) and text[done + right : done + right + 1] == guess[right : right + 1]:
                right += 1
            done, steps = done + right + 1, steps + 1
        tokens += len(text) - 2
    plain, lookup, draft = measure_doctags(n=2, n_training=1, steps=1)
    assert plain.is_exact and lookup.is_exact and draft.is_exact and plain.tokens_per_step == 1
    assert lookup.tokens_per_step == tokens / steps > 1
