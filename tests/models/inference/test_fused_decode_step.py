"""The fused decode step reads adjacent weights as one, and holds no copies."""

import copy

import pytest
import torch
from torch import nn

from models.inference.fused_decode_step import FusedDecodeStep, adjacent, concat_linears
from models.inference.quantization import quantize_int8
from models.lora import adapt
from models.vision_language_model import VisionLanguageModel


def test_adjacent_tensors_are_one_view():
    whole = torch.arange(24.0).view(6, 4)
    a, b, c = whole.split([3, 1, 2])
    joined = adjacent([a, b, c])
    assert torch.equal(joined, whole) and joined.data_ptr() == whole.data_ptr()
    for apart in ([a, c], [b, a], [a, b.clone()], [whole.t()[:2], whole.t()[2:]]):
        assert adjacent(apart) is None


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("quantized", [True, False])
def test_concatenated_linears_are_all_of_them(tiny_model, packed, quantized):
    decoder = tiny_model().decoder
    if quantized:
        quantize_int8(decoder)
    if packed:
        decoder.pack_projections()
    x = torch.randn(1, 24)
    for block in decoder.blocks:
        for linears in (
            (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj),
            (block.mlp.gate_proj, block.mlp.up_proj),
        ):
            assert (adjacent([linear.weight for linear in linears]) is not None) == packed
            torch.testing.assert_close(concat_linears(*linears)(x), torch.cat([linear(x) for linear in linears], -1))


def test_linears_with_biases_or_adapters_are_called_as_they_are(tiny_model):
    linears = [nn.Linear(8, 3), nn.Linear(8, 5)]
    x = torch.randn(1, 8)
    torch.testing.assert_close(concat_linears(*linears)(x), torch.cat([linear(x) for linear in linears], -1))
    adapt(model := tiny_model(), 2, 4, ("decoder",))
    attn = model.decoder.blocks[0].attn
    nn.init.normal_(attn.k_proj.lora_B.weight)
    x, linears = torch.randn(1, 24), (attn.q_proj, attn.k_proj, attn.v_proj)
    torch.testing.assert_close(concat_linears(*linears)(x), torch.cat([linear(x) for linear in linears], -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_changes_places_only(tiny_model, dtype):
    model, plain = tiny_model().to(dtype), tiny_model().to(dtype)
    parameters = dict(model.named_parameters())
    model.decoder.pack_projections()
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values()))
    attn = model.decoder.blocks[0].attn
    assert attn.q_proj.weight.untyped_storage().data_ptr() == attn.v_proj.weight.untyped_storage().data_ptr()
    loss = model(torch.tensor([[5, 7, 9]]), targets=torch.tensor([[7, 9, 8]]))[1]
    loss.backward()
    assert attn.k_proj.weight.grad.shape == attn.k_proj.weight.shape


def test_the_step_is_for_the_models_own_blocks_and_precisions(tiny_model):
    assert FusedDecodeStep.supports(tiny_model().decoder)
    assert not FusedDecodeStep.supports(tiny_model().double().decoder)
    with torch.device("meta"):
        assert not FusedDecodeStep.supports(VisionLanguageModel(tiny_model().cfg, 3).decoder)
    other = copy.deepcopy(tiny_model().decoder)
    other.blocks[1].mlp = nn.Identity()
    assert not FusedDecodeStep.supports(other)
