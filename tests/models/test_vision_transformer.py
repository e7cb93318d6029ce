"""The vision encoder matches SigLIP, the projector Idefics3's pixel shuffle."""

import pytest
import torch

from models.formats.smolvlm import SmolVLM
from models.formats.to_smolvlm import smolvlm_config
from models.modality_projector import pixel_shuffle
from support import Package

transformers = Package("transformers")


@pytest.mark.full
@pytest.mark.parametrize(("n_heads", "n_blocks", "img_size"), [(1, 1, 16), (4, 3, 32), (2, 2, 8)])
@torch.no_grad()
def test_features_match_transformers_siglip(tiny_model, n_heads, n_blocks, img_size):
    side = {"vit_img_size": img_size, "max_img_size": img_size, "mp_image_token_length": (img_size // 8) ** 2}
    model = tiny_model(vit_n_heads=n_heads, vit_n_blocks=n_blocks, **side)
    config = smolvlm_config(model.cfg, image_token_id=3, eos_token_id=2)["vision_config"] | {"model_type": None}
    theirs = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**config, vision_use_head=False)).eval()
    ours = {name: x for name, x in model.state_dict().items() if name.startswith("vision_encoder.")}
    stored = {name.removeprefix("model.vision_model."): x for name, x in SmolVLM.to_stored(ours).items()}
    theirs.load_state_dict({name: stored[name.removeprefix("vision_model.")] for name in theirs.state_dict()})
    images = torch.rand(3, 3, img_size, img_size)
    torch.testing.assert_close(model.vision_encoder(images), theirs(images).last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("side", "factor"), [(4, 2), (4, 1), (4, 4), (6, 3), (8, 4)])
def test_pixel_shuffle_matches_idefics3(side, factor):
    connector = pytest.importorskip("transformers.models.idefics3.modeling_idefics3").Idefics3Connector
    x = torch.randn(2, side * side, 5)
    assert torch.equal(pixel_shuffle(x, factor), connector.pixel_shuffle(None, x, factor))


def test_pixel_shuffle_puts_the_rows_of_a_square_one_after_another():
    patches = torch.arange(36).view(1, 36, 1)
    assert pixel_shuffle(patches, 3)[0].tolist() == [
        [0, 1, 2, 6, 7, 8, 12, 13, 14],
        [3, 4, 5, 9, 10, 11, 15, 16, 17],
        [18, 19, 20, 24, 25, 26, 30, 31, 32],
        [21, 22, 23, 27, 28, 29, 33, 34, 35],
    ]


@pytest.mark.parametrize(("patches", "factor"), [(15, 1), (16, 3), (36, 4)])
def test_patches_that_are_not_a_square_are_refused(patches, factor):
    with pytest.raises(ValueError, match=f"{patches} patches .* multiple of {factor}"):
        pixel_shuffle(torch.zeros(1, patches, 2), factor)
