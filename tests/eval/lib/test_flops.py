"""Theoretical costs against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eval.lib import flops
from eval.lib.cache_study import exponent
from models.kv_study.text_decoder import TextPrefillState


@pytest.mark.parametrize("past", [0, 6])
def test_theory_counts_the_matrix_products_that_run(tiny_model, past):
    """Against torch's counter of linear layers; attention is added by formula, since torch counts its whole square."""
    model, n = tiny_model(lm_n_heads=4), 5
    cfg, x = model.cfg, torch.randn(1, past + n, model.cfg.lm_hidden_dim)
    with torch.no_grad():
        cache = model.decoder(x[:, :past])[1] if past else None
        with FlopCounterMode(display=False) as counter:
            hidden, _ = model.decoder(x[:, past:], kv_cache=cache, start_pos=past)
            model.decoder.head(hidden[:, -1])
    linears = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    attention = sum(4 * cfg.lm_hidden_dim * (i + 1) for i in range(past, past + n)) * cfg.lm_n_blocks
    assert flops.language_model(cfg)(past, past + n) == linears + attention


@pytest.mark.parametrize("past", [0, 6])
def test_theory_counts_the_encoder_decoders_matrix_products(encoder_decoder, past):
    decoder, n, xa = encoder_decoder.decoder, 5, torch.randn(1, 16, encoder_decoder.cfg.lm_hidden_dim)
    ids = torch.randint(40, (1, past + n))
    with torch.no_grad():
        prefix = (
            None
            if not past
            else decoder.forward_cached(ids[:, :past], TextPrefillState(decoder.project_cross_kv(xa)))[1]
        )
        with FlopCounterMode(display=False) as counter:
            prefix = prefix or TextPrefillState(decoder.project_cross_kv(xa))
            decoder.logits(decoder.forward_cached(ids[:, past:], prefix)[0][:, -1])
    linears = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    seen = sum(i + 1 + 16 for i in range(past, past + n))
    cfg = encoder_decoder.cfg
    attention = 4 * cfg.lm_hidden_dim * seen * cfg.lm_n_blocks
    assert flops.text_decoder(cfg, 16)(past, past + n) == linears + attention


def test_theory_grows_quadratically_without_a_cache_and_linearly_with_one():
    """Where neither attention nor the prompt adds another term."""

    def read(start, stop):
        return stop - start

    lengths = [1000, 2000]
    for cached, expected in ((False, 2), (True, 1)):
        costs = [flops.generation(read, 1, n, cached) - flops.generation(read, 1, 1, cached) for n in lengths]
        assert abs(exponent(lengths, costs) - expected) <= 0.01
