"""The vision encoder matches SigLIP, the projector Idefics3's pixel shuffle."""

import pytest
import torch

from models.modality_projector import pixel_shuffle
from support import Package

transformers = Package("transformers")

OURS = {
    "embeddings.patch_embedding": "patch_embedding.conv",
    "embeddings.position_embedding": "patch_embedding.position_embedding",
    "post_layernorm": "layer_norm",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def our_weight(name, ours):
    """The weight of ours that SigLIP's tensor of this name should equal."""
    name = name.removeprefix("vision_model.")
    block = ""
    if name.startswith("encoder.layers."):
        _, _, number, name = name.split(".", 3)
        block = f"blocks.{number}."
    module, kind = name.rsplit(".", 1)
    if module in (f"self_attn.{letter}_proj" for letter in "qkv"):
        return ours[f"{block}attn.qkv_proj.{kind}"].chunk(3)["qkv".index(module[10])]
    if module == "embeddings.position_embedding":
        return ours[OURS[module]][0]
    return ours[f"{block}{OURS[module]}.{kind}"]


@pytest.mark.full
@pytest.mark.parametrize(("n_heads", "n_blocks", "img_size"), [(1, 1, 16), (4, 3, 32), (2, 2, 8)])
@torch.no_grad()
def test_features_match_transformers_siglip(tiny_model, n_heads, n_blocks, img_size):
    side = {"vit_img_size": img_size, "max_img_size": img_size, "mp_image_token_length": (img_size // 8) ** 2}
    encoder = tiny_model(vit_n_heads=n_heads, vit_n_blocks=n_blocks, **side).vision_encoder
    theirs = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=n_blocks,
            num_attention_heads=n_heads,
            image_size=img_size,
            patch_size=4,
            vision_use_head=False,
        )
    ).eval()
    ours = encoder.state_dict()
    theirs.load_state_dict({name: our_weight(name, ours) for name in theirs.state_dict()})
    images = torch.rand(3, 3, img_size, img_size)
    torch.testing.assert_close(encoder(images), theirs(images).last_hidden_state, atol=1e-5, rtol=1e-5)


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
