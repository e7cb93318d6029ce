"""oneDNN's products are those of torch's own way, up to rounding, and nothing else of a model changes."""

import pytest
import torch
from torch import nn

from models.inference.cpu_kernels import OneDNNLinear, made_by, onednn_pays_off, use_onednn
from models.kv_study.static_cache import export_language_model


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr("models.inference.cpu_kernels.LARGE", 0)


there = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch was built without oneDNN")


@there
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 24), (3, 24), (24,), (2, 5, 24), (0, 24), (2, 3, 4, 24)])
def test_products_are_those_of_the_usual_way(shape, bias):
    linear = nn.Linear(24, 40, bias=bias)
    x = torch.randn(shape)
    wanted = linear(x).detach()
    use_onednn(module := nn.Sequential(linear))
    with torch.inference_mode():
        torch.testing.assert_close(module(x), wanted)
        wide = torch.randn(*shape[:-1], 48)[..., ::2]
        torch.testing.assert_close(module(wide), nn.functional.linear(wide, linear.weight, linear.bias))


def test_small_weights_stay_as_they_are(monkeypatch):
    monkeypatch.setattr("models.inference.cpu_kernels.LARGE", 24 * 40)
    model = use_onednn(nn.Sequential(nn.Linear(24, 40), nn.Linear(24, 39)))
    assert [type(linear) for linear in model] == [OneDNNLinear, nn.Linear]


@there
def test_a_model_says_the_same_and_keeps_its_names(tiny_model):
    model, usual = tiny_model(), tiny_model()
    assert use_onednn(model) is model
    assert isinstance(model.MP.proj, OneDNNLinear) and type(model.decoder.norm) is type(usual.decoder.norm)
    ids, images = torch.tensor([[5, 3, 3, 3, 3, 7, 9]]), torch.rand(1, 3, 16, 16)
    for use_kv_cache in (True, False):
        said = [m.generate(ids, images, max_new_tokens=20, use_kv_cache=use_kv_cache) for m in (model, usual)]
        assert torch.equal(*said)
    assert model.state_dict().keys() == usual.state_dict().keys()
    use_onednn(model, on=False)
    assert not any(isinstance(module, OneDNNLinear) for module in model.modules())


@there
def test_gradients_other_precisions_and_graphs_go_the_usual_way(tiny_model):
    model = use_onednn(tiny_model())
    ids, images = torch.tensor([[5, 3, 3, 3, 3, 7, 9]]), torch.rand(1, 3, 16, 16)
    _, loss = model(ids, images, targets=ids)
    loss.backward()
    assert model.MP.proj.weight.grad.abs().sum() > 0
    graphs = export_language_model(model.decoder, capacity=16).values()
    assert not any("mkldnn" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert model.bfloat16().generate(ids, images, max_new_tokens=3).shape == (1, 3)


def test_it_pays_off_on_amds_processors_only(monkeypatch, tmp_path):
    for maker, wanted in (("AuthenticAMD", True), ("GenuineIntel", False)):
        (tmp_path / "cpuinfo").write_text(f"vendor_id : {maker}\n")
        monkeypatch.setattr("models.inference.cpu_kernels.CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr("models.inference.cpu_kernels.made_by", made_by.__wrapped__)
        monkeypatch.setattr("torch.backends.mkl.is_available", lambda: True)
        assert onednn_pays_off() == (wanted and hasattr(torch.ops.mkldnn, "_linear_pointwise"))
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: False)
    assert not onednn_pays_off()
