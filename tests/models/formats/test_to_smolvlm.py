"""Limits of SmolVLM's settings; tests/nanovlm/export compares the weights and prompts."""

import pytest
import torch

from models.common.errors import InputError
from models.formats.smolvlm import SmolVLM
from models.formats.to_smolvlm import smolvlm_config
from support import Package

transformers = Package("transformers")
pytestmark = pytest.mark.full


def test_what_smolvlm_cannot_express_is_refused(tiny_config):
    side = {"vit_img_size": 76, "max_img_size": 76, "mp_pixel_shuffle_factor": 1, "mp_image_token_length": 361}
    with pytest.raises(InputError, match=r"19 patches a side \(vit_img_size=76 / vit_patch_size=4\)"):
        smolvlm_config(tiny_config(**side), 3, 2)
    with pytest.raises(InputError, match="lm_attn_scaling=1.5: SmolVLM's attention has no such factor"):
        smolvlm_config(tiny_config(lm_attn_scaling=1.5), 3, 2)
    cfg = tiny_config(vlm_extra_tokens=None)
    assert cfg.format_version == 1 and smolvlm_config(cfg, -1, 2)["image_token_id"] == cfg.lm_vocab_size


@pytest.mark.parametrize("grid", [12, 14, 16, 19, 24, 25, 27, 32])
def test_folded_grids_match_transformers_code(grid):
    config = transformers.SmolVLMVisionConfig(image_size=grid, patch_size=1, hidden_size=1)
    embeddings = transformers.models.smolvlm.modeling_smolvlm.SmolVLMVisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(grid**2)[:, None])
        positions = embeddings(torch.zeros(1, 3, grid, grid), torch.ones(1, grid, grid, dtype=torch.bool)).flatten()
    assert (positions.tolist() == list(range(grid**2))) == (SmolVLM.patch_positions(grid) == list(range(grid)))
