"""In bfloat16 on CPUs a model computes in other ways, and says the same up to rounding."""

import pytest
import torch
from torch import nn

import models.attention as attention_module
from models.inference import fused_vision
from models.inference.cpu_kernels import use_onednn
from models.inference.fused_vision import FusedMLP, FusedVisionTransformer, use_fused
from models.vision_transformer import MLP, VisionTransformer

there = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch was built without oneDNN")
LARGER = {"vit_img_size": 32, "mp_image_token_length": 16, "lm_max_position_embeddings": 256}  # 64 patches an image


def prompt(seed=0):
    """Two images, 16 embeddings each, and words."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.full((32,), 3), torch.randint(4, 40, (12,), generator=draw)])[None]
    return ids, torch.rand(2, 3, 32, 32, generator=draw)


def distance(got, wanted):
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys", "groups"), [(40, 40, 4), (40, 40, 2), (33, 33, 1), (8, 8, 2), (5, 40, 2)])
def test_attention_by_rows_is_attention(monkeypatch, causal, masked, queries, keys, groups):
    if causal and (masked or queries != keys):
        pytest.skip("causal is for sequences without a past or a mask")
    for name in ("ROWS", "FEWEST"):
        monkeypatch.setattr(attention_module, name, 8)
    by_rows, called = attention_module._by_rows, []
    monkeypatch.setattr(attention_module, "_by_rows", lambda *inputs: called.append(1) or by_rows(*inputs))
    q = torch.randn(3, 4, queries, 16)
    k, v = torch.randn(2, 3, groups, keys, 16)
    mask = torch.rand(3, 1, queries, keys) < 0.6 if masked else None
    if masked:
        mask[..., 0] = True  # each sees something
    wanted = attention_module.attention(q, k, v, mask, causal)
    assert not called, "float32 goes its usual way"
    with torch.inference_mode():
        got = attention_module.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask, causal)
    assert called and got.dtype == torch.bfloat16 and got.shape == wanted.shape
    assert distance(got, wanted) < 0.01


@pytest.fixture
def models(tiny_model, monkeypatch):
    """The same weights three times: float32, bfloat16, and bfloat16 with all that makes it faster."""
    monkeypatch.setattr(fused_vision, "TOGETHER", 64)
    monkeypatch.setattr("models.inference.cpu_kernels.LARGE", 0)
    exact, plain, fast = (tiny_model(**LARGER) for _ in range(3))
    return exact, plain.bfloat16(), use_fused(use_onednn(fast.bfloat16()))


@there
@torch.inference_mode()
def test_a_fused_model_is_as_close_to_float32_as_a_plain_one(models, monkeypatch):
    exact, plain, fast = models
    ids, images = prompt()
    wanted = exact.prefill(ids, images)[0]
    usual = distance(plain.prefill(ids, images)[0], wanted)
    for name in ("ROWS", "FEWEST"):
        monkeypatch.setattr(attention_module, name, 8)
    usual_way, called = MLP.forward, []
    monkeypatch.setattr(MLP, "forward", lambda *inputs: called.append(1) or usual_way(*inputs))
    assert distance(fast.prefill(ids, images)[0], wanted) < max(2 * usual, 0.02)
    assert not called, "every MLP was fused"


@there
def test_names_weights_and_the_way_back_stay(models):
    _, plain, fast = models
    assert fast.state_dict().keys() == plain.state_dict().keys()
    assert type(fast.vision_encoder) is FusedVisionTransformer
    assert type(fast.vision_encoder.blocks[1].mlp) is FusedMLP
    use_fused(fast, on=False)
    assert type(fast.vision_encoder) is VisionTransformer
    assert type(fast.vision_encoder.blocks[1].mlp) is MLP


@there
def test_float32_gradients_graphs_and_other_linears_go_the_usual_way(tiny_model):
    plain, fast = tiny_model(**LARGER), use_fused(tiny_model(**LARGER))
    ids, images = prompt()
    assert torch.equal(fast.generate(ids, images, max_new_tokens=20), plain.generate(ids, images, max_new_tokens=20))
    _, loss = fast.bfloat16()(ids, images, targets=ids)
    loss.backward()
    mlp = fast.vision_encoder.blocks[0].mlp
    assert mlp.fc1.weight.grad.abs().sum() > 0
    x = torch.randn(1, 32, 16).bfloat16()
    with torch.inference_mode():
        graph = torch.export.export(nn.Sequential(mlp), (x,)).graph
    assert not any("mkldnn" in str(node.target) for node in graph.nodes)

    class Other(nn.Linear):
        def forward(self, x):
            return torch.zeros(*x.shape[:-1], self.out_features, dtype=x.dtype)

    mlp.fc1.__class__ = Other
    with torch.inference_mode():
        assert (mlp(x) == mlp.fc2.bias).all()


@there
@torch.inference_mode()
def test_many_images_are_looked_at_a_few_at_a_time(tiny_model, monkeypatch):
    model, sizes = tiny_model(**LARGER), []
    images = torch.rand(5, 3, 32, 32)
    whole = model.vision_encoder(images)
    embed = model.vision_encoder.patch_embedding
    monkeypatch.setattr(fused_vision, "TOGETHER", 128)
    embed.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    few = use_fused(model).vision_encoder(images)
    assert sizes == [2, 2, 1]
    torch.testing.assert_close(few, whole)
