"""Attention in bfloat16, by chunks or by SDPA, gives what attention in float32 gives."""

import pytest
import torch

import models.attention as attention_module


def relative_error(got, wanted):
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "groups"), [(40, 40, 4), (40, 40, 2), (33, 33, 1), (8, 8, 2), (5, 40, 2), (1, 40, 2)]
)
@pytest.mark.parametrize("fast_sdpa", [False, True], ids=["chunked", "sdpa"])
def test_attention_in_bfloat16_matches_float32(monkeypatch, fast_sdpa, causal, masked, queries, keys, groups):
    if causal and (masked or queries != keys):
        pytest.skip("causal is for sequences without a past or a mask")
    for name in ("CHUNK_QUERIES", "MIN_CHUNKED_KEYS"):
        monkeypatch.setattr(attention_module, name, 8)
    monkeypatch.setattr(attention_module, "sdpa_is_fast_in_bfloat16", lambda: fast_sdpa)
    q = torch.randn(3, 4, queries, 16)
    k, v = torch.randn(2, 3, groups, keys, 16)
    mask = torch.rand(3, 1, queries, keys) < 0.6 if masked else None
    if masked:
        mask[..., 0] = True  # each query sees a key
    wanted = attention_module.attention(q, k, v, mask, causal)
    with torch.inference_mode():
        got = attention_module.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask, causal)
    assert got.dtype == torch.bfloat16 and got.shape == wanted.shape
    assert relative_error(got, wanted) < 0.01


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fast_sdpa", [False, True])
@pytest.mark.parametrize("queries", [1, 40])
def test_a_mask_that_is_added_to_the_scores_acts_as_a_boolean_one(monkeypatch, dtype, fast_sdpa, queries):
    monkeypatch.setattr(attention_module, "sdpa_is_fast_in_bfloat16", lambda: fast_sdpa)
    q, (k, v) = torch.randn(3, 4, queries, 16).to(dtype), torch.randn(2, 3, 2, 40, 16).to(dtype)
    mask = torch.rand(3, 1, queries, 40) < 0.6
    mask[..., 0] = True
    bias = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
    got, wanted = (attention_module.attention(q, k, v, m) for m in (bias, mask))
    torch.testing.assert_close(got, wanted)
