"""int8 weights are the nearest that a row's scale allows, and act as the numbers that they stand for."""

import pytest
import torch
from torch import nn

from models.inference.quantization import FEW, Int8Linear, use_int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, FEW, FEW + 1, 70])
@pytest.mark.parametrize("width", [96, 24])
@pytest.mark.parametrize("bias", [True, False])
def test_it_acts_as_the_numbers_that_it_stands_for(dtype, rows, width, bias):
    torch.manual_seed(0)
    linear = nn.Linear(width, 64, bias=bias).to(dtype)
    with torch.no_grad():
        linear.weight[3] = 0
        linear.weight[4] *= 1000
    exact, quantised = linear.weight.float(), Int8Linear(linear)
    weight = quantised.weight.float() * quantised.scale.float()[:, None]
    half = quantised.scale.float()[:, None] / 2
    assert quantised.weight.dtype == torch.int8 and ((weight - exact).abs() <= half * 1.02).all()
    x = torch.randn(2, rows // 2, width).to(dtype) if rows % 2 == 0 else torch.randn(rows, width).to(dtype)
    with torch.inference_mode():
        wanted = nn.functional.linear(x.float(), weight, linear.bias.float() if bias else None)
        said = quantised(x)
    assert said.dtype == dtype and said.shape == wanted.shape
    torch.testing.assert_close(said.float(), wanted, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=0.05)


def test_a_shared_embedding_stays_exact(tiny_model):
    model, usual = tiny_model(), tiny_model()
    assert use_int8(model.decoder) is model.decoder
    assert torch.equal(model.decoder.token_embedding.weight, usual.decoder.token_embedding.weight)
    assert isinstance(model.decoder.head, Int8Linear) and isinstance(model.decoder.blocks[1].mlp.up_proj, Int8Linear)
    assert not any(isinstance(module, Int8Linear) for module in model.vision_encoder.modules())
    ids, images = torch.tensor([[5, 3, 3, 3, 3, 7, 9]]), torch.rand(1, 3, 16, 16)
    with torch.inference_mode():
        a, b = model.prefill(ids, images)[0], usual.prefill(ids, images)[0]
    assert 0 < (a - b).abs().max() < 0.1 * b.abs().max()
    assert torch.equal(
        model.generate(ids, images, max_new_tokens=20),
        model.generate(ids, images, max_new_tokens=20, use_kv_cache=False),
    )
    with pytest.raises(ValueError, match="already"):
        use_int8(model.decoder)
