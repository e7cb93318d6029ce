"""Which linear layers are quantized; int8 weights are the nearest that a row's scale allows, and act as such."""

import pytest
import torch
from torch import nn

from models.errors import InputError
from models.inference import quantization
from models.inference.int4 import Int4Linear
from models.inference.live_weights import share_modules
from models.inference.quantization import MAX_KERNEL_ROWS, Int8Linear, quantize_int4, quantize_int8, quantizer
from models.lora import adapt, adapters, merge


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1, 70])
@pytest.mark.parametrize("width", [96, 24])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_linear_acts_as_its_dequantized_weight(monkeypatch, dtype, rows, width, bias):
    monkeypatch.setattr(quantization, "CONVERTED_ROWS", 50)
    torch.manual_seed(0)
    linear = nn.Linear(width, 64, bias=bias).to(dtype)
    with torch.no_grad():
        linear.weight[3] = 0
        linear.weight[4] *= 1000
    exact, quantized = linear.weight.float(), Int8Linear(linear.weight, linear.bias)
    weight = quantized.weight.float() * quantized.scale.float()[:, None]
    half = quantized.scale.float()[:, None] / 2
    assert quantized.weight.dtype == torch.int8 and ((weight - exact).abs() <= half * 1.02).all()
    x = torch.randn(2, rows // 2, width).to(dtype) if rows % 2 == 0 else torch.randn(rows, width).to(dtype)
    with torch.inference_mode():
        wanted = nn.functional.linear(x.float(), weight, linear.bias.float() if bias else None)
        got = quantized(x)
    assert got.dtype == dtype and got.shape == wanted.shape
    torch.testing.assert_close(got.float(), wanted, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=0.05)


def test_a_shared_embedding_stays_exact(tiny_model):
    model, plain = tiny_model(), tiny_model()
    assert quantize_int8(model.decoder) is model.decoder
    assert torch.equal(model.decoder.token_embedding.weight, plain.decoder.token_embedding.weight)
    assert isinstance(model.decoder.head, Int8Linear) and isinstance(model.decoder.blocks[1].mlp.up_proj, Int8Linear)
    assert not any(isinstance(module, Int8Linear) for module in model.vision_encoder.modules())
    ids, images = torch.tensor([[5, 3, 3, 3, 3, 7, 9]]), torch.rand(1, 3, 16, 16)
    with torch.inference_mode():
        a, b = model.prefill(ids, images)[0], plain.prefill(ids, images)[0]
    assert 0 < (a - b).abs().max() < 0.1 * b.abs().max()
    assert torch.equal(
        model.generate(ids, images, max_new_tokens=20),
        model.generate(ids, images, max_new_tokens=20, use_kv_cache=False),
    )
    with pytest.raises(ValueError, match="already"):
        quantize_int8(model.decoder)


def test_adapters_are_merged_before_quantization(tiny_model):
    adapt(model := tiny_model(), 2, 4, ("decoder",))
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_B.weight.normal_()
    merged = merge(model)
    ids = torch.tensor([[5, 7, 9]])
    quantized, wanted = (quantize_int8(share_modules(m).decoder) for m in (model, merged))
    with torch.inference_mode():
        x = model.embed(ids)
        torch.testing.assert_close(quantized(x)[0], wanted(x)[0])


def test_an_unknown_kind_of_linear_is_refused():
    class Other(nn.Linear):
        pass

    with pytest.raises(ValueError, match="is a Other, which quantization does not know"):
        quantize_int8(nn.Sequential(Other(4, 4)))


def test_int4_needs_inputs_of_whole_groups(tiny_model, caplog):
    decoder = tiny_model().decoder  # 24 features, 32 inside an MLP
    exact = decoder.token_embedding.weight.clone()
    with caplog.at_level("INFO", "models"):
        assert quantize_int4(decoder) is decoder
    for block in decoder.blocks:
        assert isinstance(block.mlp.down_proj, Int4Linear) and isinstance(block.attn.q_proj, Int8Linear)
    assert "a weight of 24 input features, not a multiple of 32, becomes int8" in caplog.messages
    assert torch.equal(decoder.token_embedding.weight, exact) and isinstance(decoder.head, Int8Linear)
    with pytest.raises(InputError, match="is an Int8Linear already"):
        quantize_int4(decoder)


def test_quantizers_have_names():
    assert quantizer("int8") is quantizer("int8-weights") is quantize_int8 and quantizer("int4") is quantize_int4
    with pytest.raises(
        InputError, match="quantize='int3' is not supported; use 'int8', 'int8-weights', 'int4' or None"
    ):
        quantizer("int3")
