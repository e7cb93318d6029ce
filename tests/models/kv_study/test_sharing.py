"""Sharing across blocks (CLA) and a latent cache (MLA), by their definitions; test_contract.py reads them in chunks."""

import pytest
import torch

from models.kv_study.sharing import CrossLayerModel, LatentAttention
from models.language_model import LanguageModel, apply_rope, rope_cos_sin
from support import randomize


@pytest.fixture
def models(tiny_config):
    torch.manual_seed(0)
    cfg = tiny_config(lm_use_tokens=True, lm_n_blocks=4)
    latent = LanguageModel(cfg)
    for block in latent.blocks:
        block.attn = LatentAttention(cfg, latent_dim=5)
    return {"CLA": randomize(CrossLayerModel(cfg)).eval(), "MLA": randomize(latent).eval()}


@pytest.mark.parametrize(("name", "bytes_per_token"), [("CLA", 2 * 2 * 2 * 4 * 4), ("MLA", 4 * (5 + 4) * 4)])
def test_their_caches_are_small(models, name, bytes_per_token):
    _, kv_cache = models[name](torch.randint(40, (2, 14)))
    assert sum(kv.bytes_used for kv in kv_cache) == 2 * 14 * bytes_per_token


def test_absorbed_projections_are_attention_with_keys_and_values_of_every_head(models):
    attn, cfg = models["MLA"].blocks[0].attn, models["MLA"].cfg
    x, (cos, sin) = torch.randn(2, 7, 24), rope_cos_sin(torch.arange(7), cfg)
    q = attn.q_proj(x).view(2, 7, 6, 8).transpose(1, 2)
    latent, rotary = attn.down_proj(x).split([5, 4], -1)
    k = torch.einsum("btr,hdr->bhtd", latent, attn.k_up)
    v = torch.einsum("btr,hdr->bhtd", latent, attn.v_up)
    k = torch.cat([k, apply_rope(rotary[:, None], cos, sin).expand(2, 6, 7, 4)], -1)
    q = torch.cat([q[..., :4], apply_rope(q[..., 4:], cos, sin)], -1)
    scores = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf)
    expected = attn.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x, cos, sin)[0], expected, atol=1e-4, rtol=1e-4)


def test_a_shared_block_is_attention_with_the_projections_of_the_block_before(models):
    model, ids = models["CLA"], torch.randint(40, (2, 9))
    x, (cos, sin) = model.token_embedding(ids), rope_cos_sin(torch.arange(9), model.cfg)
    for owner, shared in zip(model.blocks[::2], model.blocks[1::2]):
        y, kv = owner(x, cos, sin)
        q = apply_rope(shared.attn.q_proj(shared.norm1(y)).view(2, 9, 6, 4).transpose(1, 2), cos, sin)
        k, v = (part.repeat_interleave(3, 1) for part in (kv.key, kv.value))
        scores = (q @ k.mT / 2).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
        y = y + shared.attn.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = y + shared.mlp(shared.norm2(y))
    torch.testing.assert_close(model.head(model.norm(x)), model(ids)[0], atol=1e-4, rtol=1e-4)
