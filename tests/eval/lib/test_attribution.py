"""The factors of minGPT's speedup: their product is the whole, and all four steps agree."""

import pytest
import torch

from eval.benchmark import MismatchError, make_models
from eval.lib.attribution import attribute, attribute_step, attribution_table


def test_the_factors_multiply_to_the_whole():
    rows = attribute(torch.device("cpu"), "gpt-nano", (6, 24), rounds=2, vocab_size=50)
    assert [row.context for row in rows] == [6, 24]
    for row in rows:
        assert row.kernel * row.head * row.cache == pytest.approx(row.total)
        assert row.explicit_ms > 0 < row.cached_ms
    assert attribution_table(rows).count("x\n") == 1 and "cache alone" in attribution_table(rows)


def test_a_step_that_computes_something_else_is_an_error():
    gpt, gpt_kv = make_models("gpt-nano", torch.device("cpu"), 50)
    with torch.no_grad():
        gpt.transformer.ln_f.bias += torch.linspace(0, 3, 48)  # the twins share their weights
        gpt_kv.transformer.ln_f.bias = torch.nn.Parameter(torch.zeros(48))
    with pytest.raises(MismatchError, match="fused step"):
        attribute_step(gpt, gpt_kv, torch.arange(8)[None], rounds=1)
