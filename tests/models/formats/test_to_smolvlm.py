"""Conversion of configs and weights to transformers' SmolVLM."""

import pytest
import torch

from models.errors import InputError
from models.formats.smolvlm import SmolVLM
from models.formats.to_smolvlm import (
    smolvlm_config,
    smolvlm_tensors,
)
from support import Package
from support.smolvlm import assert_same_logits

transformers = Package("transformers")
pytestmark = pytest.mark.full


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["SmolVLM", "Idefics3"])
def test_transformers_smolvlm_and_idefics3_compute_the_same_logits(tmp_path, tiny_model, tied, kind):
    model = tiny_model(lm_tie_weights=tied)
    config = smolvlm_config(model.cfg, image_token_id=3, eos_token_id=2)
    if kind == "Idefics3":
        config |= {"model_type": "idefics3", "vision_config": config["vision_config"] | {"model_type": None}}
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**config))
    result = theirs.load_state_dict(smolvlm_tensors(model), strict=False)
    assert result.unexpected_keys == [] and result.missing_keys == (["lm_head.weight"] if tied else [])
    theirs.tie_weights()
    ids = torch.randint(4, 40, (1, 20))
    ids[0, 2:6] = ids[0, 9:13] = 3
    assert_same_logits(model, theirs.eval(), ids, torch.rand(2, 3, 16, 16))


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
