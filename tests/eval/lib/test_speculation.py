"""The speculation table: tokens per step and identical answers, of a model that learned to repeat a digit."""

import torch

from eval.lib.speculation import small_config, speculation, speculation_table, train_decoder
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
