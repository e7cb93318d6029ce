"""The language model computes its definition and masks what a token must not attend to.

formats/test_backbones.py holds it to transformers' Llama.
"""

from dataclasses import replace
from random import Random

import pytest
import torch

from models.attention import attention
from models.cache import KVCache
from models.language_model import LanguageModel, RMSNorm


@pytest.fixture(scope="session")
def tiny_decoder(tiny_model):
    def make(dtype=torch.float32, **changes) -> LanguageModel:
        embedded = tiny_model(**changes).decoder
        decoder = LanguageModel(replace(embedded.cfg, lm_use_tokens=True))
        decoder.load_state_dict(embedded.state_dict())
        return decoder.eval().to(dtype)

    return make


def words(rows, n, seed=1):
    return torch.randint(40, (rows, n), generator=torch.Generator().manual_seed(seed))


def test_a_cache_or_start_that_does_not_fit_is_refused(tiny_decoder):
    decoder = tiny_decoder()
    (_, five), (_, full) = decoder(words(1, 5), kv_cache=[None] * 2), decoder(words(1, 64))
    for n, mask, kv_cache, start, message in (
        (1, None, five, 4, "start_pos=4, .* 5 tokens"),
        (1, None, None, 2, "start_pos=2, .* 0 tokens"),
        (1, torch.ones(1, 5), five, 5, "covers 5 tokens, not 5 cached \\+ 1 new"),
        (65, None, None, 0, "65 tokens exceed lm_max_position_embeddings=64"),
        (1, None, full, 64, "65 tokens exceed lm_max_position_embeddings=64"),
        (1, None, [None] * 3, 0, "kv_cache has 3 blocks, but the model 2"),
        (1, None, [None, *five[1:]], 0, r"different numbers of tokens: \[0, 5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder(words(1, n), mask, kv_cache, start)


@torch.no_grad()
def test_lm_attn_scaling_scales_the_scores_with_its_square(tiny_decoder):
    scaled, plain = tiny_decoder(lm_attn_scaling=1.3), tiny_decoder()
    for block in plain.blocks:
        block.attn.q_proj.weight *= 1.3**2
    ids = words(2, 20)
    assert not torch.allclose(scaled(ids)[0], tiny_decoder()(ids)[0], atol=1e-2)
    torch.testing.assert_close(scaled(ids)[0], plain(ids)[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_bfloat16_model_rotates_keys_as_float64_at_the_last_positions(tiny_decoder):
    decoder = tiny_decoder(torch.bfloat16, lm_max_position_embeddings=8192, lm_re_base=100000, lm_n_blocks=1)
    cfg, attn = decoder.cfg, decoder.blocks[0].attn
    past, T, half = 8176, 16, cfg.lm_head_dim // 2
    empty = torch.zeros(1, cfg.lm_n_kv_heads, past, cfg.lm_head_dim, dtype=torch.bfloat16)
    _, (cache,) = decoder(ids := words(1, T), None, [KVCache(empty, empty)], past)

    key = attn.k_proj(decoder.blocks[0].norm1(decoder.token_embedding(ids))).double()
    key = key.view(T, cfg.lm_n_kv_heads, 2, half).permute(1, 0, 3, 2)  # heads, T, pairs, (first, second)
    angle = torch.arange(past, past + T).double()[:, None] * 100000.0 ** -(torch.arange(half).double() / half)
    turned = torch.view_as_complex(key.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(cache.key[0, :, past:].double(), expected, atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_compute_in_float32(dtype):
    """300 squared is beyond float16, and a mean of rounded squares is off by more than one rounding."""
    x = 300 * torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (RMSNorm(64, 1e-5).to(dtype)(x) == exact.to(dtype)).float().mean() > 0.99


@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_a_continuation_attends_to_itself_and_the_prefix_only(tiny_decoder, seed):
    """Trunks with padding anywhere, branches in any order, even interleaved: the mask of packed training."""
    decoder, shuffle = tiny_decoder(), Random(seed)
    trunks = [shuffle.choices([0, 1, 1, 1], k=8) for _ in range(shuffle.randint(1, 3))]
    branches = shuffle.choices([0, 2, 3, 4], k=shuffle.randint(0, 16))
    rows = [trunk + shuffle.sample(branches, len(branches)) for trunk in trunks]
    ids, labels = words(len(rows), len(rows[0])), torch.tensor(rows)
    packed, _ = decoder(ids, labels)
    assert packed.isfinite().all()
    (_, counted), (_, plain) = decoder(ids, torch.ones_like(ids)), decoder(ids)
    torch.testing.assert_close(counted[0].key, plain[0].key)  # a mask's positions begin at 0, too
    for row, label in enumerate(labels):
        for branch in {*label.tolist()} - {0}:
            own = (label == 1) | (label == branch)
            alone, _ = decoder(ids[row, own][None])
            torch.testing.assert_close(packed[row, own], alone[0], atol=1e-5, rtol=1e-5)


def textbook(q, k, v, mask):
    """softmax(q k^T / sqrt(D)) v in float64, keys and values repeated for the heads that share them."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    scores = q @ k.mT / q.size(-1) ** 0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).float()


def qkv(H, groups, T, S, B=2, D=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, heads, n, D, generator=generator) for heads, n in ((H, T), (groups, S), (groups, S))]


@pytest.mark.parametrize("shape", [(6, 2, 1, 9), (6, 2, 7, 7), (4, 1, 7, 7), (3, 3, 7, 7), (6, 2, 5, 9), (1, 1, 1, 1)])
def test_attention_matches_the_definition(shape):
    *_, T, S = shape
    q, k, v = qkv(*shape)
    everything = torch.ones(1, 1, T, S, dtype=torch.bool)
    some = torch.rand(2, 1, T, S, generator=torch.Generator().manual_seed(1)) > 0.4
    some[..., 0] = True
    given = {(None, False): everything, (some[:1], False): some[:1], (some, False): some}
    for (mask, causal), visible in (given | ({(None, True): everything.tril()} if T == S > 1 else {})).items():
        expected = textbook(q, k, v, visible)
        torch.testing.assert_close(attention(q, k, v, mask, causal), expected, atol=1e-5, rtol=1e-5)


def test_dropout_in_training_only_keeps_the_mean(tiny_decoder):
    """Of values all 1, an answer is the weight that survived, scaled up: 1 on average, and not always."""
    q, k, _ = qkv(4, 2, 64, 64)
    torch.manual_seed(0)
    y = attention(q, k, torch.ones_like(k), causal=True, dropout_p=0.3)
    assert y.std() > 0.05 and abs(y.mean() - 1) < 0.05
    ids, decoder = words(2, 20), tiny_decoder(lm_dropout=0.5)
    assert torch.equal(decoder(ids)[0], tiny_decoder()(ids)[0])
    decoder.train()
    assert not torch.equal(decoder(ids)[0], decoder(ids)[0])
