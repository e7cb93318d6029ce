"""Tensors under llama.cpp's names: every weight once, in llama.cpp's order of channels and of patches."""

import pytest
import torch

from models.vision_language_model import VisionLanguageModel
from support.smolvlm import write_folder

pytestmark = pytest.mark.full

pytest.importorskip("gguf")
from nanovlm.export.gguf import text_tensors, to_llama_rope, vision_tensors  # noqa: E402 - it needs the package

ANGLES = torch.arange(4) * 0.3 + 0.1  # of the pairs of channels of a head


@pytest.fixture(scope="module", params=["untied", "tied", "folded"])
def model(request, tmp_path_factory):
    """folded: a grid of 19 patches, of which Idefics3 places two at the same position."""
    tied = {"tie_word_embeddings": request.param == "tied"}
    sizes = {"image_size": 76, "scale_factor": 1, "longest_edge": 152} if request.param == "folded" else {}
    write_folder(folder := tmp_path_factory.mktemp("gguf") / "model", text=tied, **tied, **sizes)
    return VisionLanguageModel.from_pretrained(folder)


def test_every_weight_has_one_name(model):
    state, cfg = model.state_dict(), model.cfg
    text, vision = dict(text_tensors(state, cfg)), dict(vision_tensors(state, cfg))
    assert sum(t.numel() for t in (*text.values(), *vision.values())) == sum(p.numel() for p in model.parameters())
    assert ("output.weight" in text) is not cfg.lm_tie_weights
    assert torch.equal(text["token_embd.weight"], model.decoder.token_embedding.weight)
    assert torch.equal(text["blk.1.ffn_gate.weight"], model.decoder.blocks[1].mlp.gate_proj.weight)
    assert torch.equal(vision["v.blk.1.attn_k.bias"], model.vision_encoder.blocks[1].attn.qkv_proj.bias.chunk(3)[1])
    assert torch.equal(vision["mm.model.fc.weight"], model.MP.proj.weight)


def test_positions_are_stored_in_the_order_of_patches(model):
    """llama.cpp adds row i to patch i; our encoder, which transformers' tests hold, may pick another row."""
    embedding = model.vision_encoder.patch_embedding
    tile = torch.zeros(1, 3, model.cfg.vit_img_size, model.cfg.vit_img_size)
    added = embedding(tile)[0] - embedding.conv.bias
    stored = dict(vision_tensors(model.state_dict(), model.cfg))["v.position_embd.weight"]
    torch.testing.assert_close(stored, added)
    assert torch.equal(stored, embedding.position_embedding[0]) is (model.cfg.vit_grid != 19)


def rotate_halves(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * ANGLES.cos() - b * ANGLES.sin(), b * ANGLES.cos() + a * ANGLES.sin()], dim=-1)


def rotate_neighbors(x):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * ANGLES.cos() - b * ANGLES.sin(), b * ANGLES.cos() + a * ANGLES.sin()], dim=-1).flatten(-2)


def test_llama_cpp_rotates_reordered_channels_as_we_rotate_ours():
    q, k = torch.randn(2, 3 * 8, 5, generator=torch.Generator().manual_seed(0))  # 3 heads of 8 channels
    x, y = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    ours = (rotate_halves((q @ x).view(3, 8)) * (k @ y).view(3, 8)).sum(-1)
    q, k = to_llama_rope(q, 3), to_llama_rope(k, 3)
    torch.testing.assert_close((rotate_neighbors((q @ x).view(3, 8)) * (k @ y).view(3, 8)).sum(-1), ours)
