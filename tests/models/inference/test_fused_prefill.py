"""Fused decoder blocks give what plain blocks give: outputs, keys and values, for any batch, past and mask."""

import pytest
import torch

from models.cache import KVCache
from models.inference.cpu_kernels import has_onednn_linear
from models.inference.eager_ops import EagerOps
from models.inference.fused_prefill import FusedBlock, fuse_decoder
from models.inference.inference_model import InferenceModel
from models.inference.live_weights import share_modules
from models.inference.quantization import quantize_int8
from models.language_model import Block, build_attention_mask, rope_cos_sin
from models.lora import adapt

WIDTH = 24  # of the tiny model
pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="this torch has no oneDNN linear")


def fused(model):
    network = share_modules(model)
    fuse_decoder(network.decoder, EagerOps())
    return network


def assert_close(got, wanted):
    (logits, state), (wanted_logits, wanted_state) = got, wanted
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-5, atol=1e-5)
    for kv, wanted_kv in zip(state.kv_cache, wanted_state.kv_cache, strict=True):
        torch.testing.assert_close(kv.key, wanted_kv.key, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kv.value, wanted_kv.value, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_prefill_and_decoding_match_the_plain_blocks(tiny_model, packed, batch):
    model = tiny_model()
    if packed:
        model.decoder.pack_projections()
    network = fused(model)
    assert len(network.decoder.blocks[0].qkv_weights) == (1 if packed else 3)
    prompt, more = torch.randn(batch, 7, WIDTH), torch.randn(batch, 4, WIDTH)
    states = []
    for one in (network, model):
        first = one.prefill_embeds(prompt)
        then = one.prefill_embeds(more, prefix=first[1])
        states.append((first, then, one.decode(torch.arange(batch), then[1])))
    for got, wanted in zip(*states):
        assert_close(got, wanted)


@torch.inference_mode()
def test_padded_and_packed_rows_match_the_plain_blocks(tiny_model):
    model = tiny_model()
    network, x = fused(model), torch.randn(2, 6, WIDTH)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    branches = torch.tensor([[1, 1, 1, 2, 2, 3], [1, 1, 2, 2, 3, 3]])
    for mask in (padded, branches):
        assert_close(network.prefill_embeds(x, mask), model.prefill_embeds(x, mask))
        torch.testing.assert_close(network.decoder(x, mask)[0], model.decoder(x, mask)[0], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_the_plain_blocks(tiny_model):
    x = torch.randn(2, 9, WIDTH)
    wanted = tiny_model().decoder(x)[0]
    plain = tiny_model().bfloat16()
    errors = [(one.decoder(x.bfloat16())[0].float() - wanted).norm() / wanted.norm() for one in (fused(plain), plain)]
    assert errors[0] < max(1.5 * errors[1], 0.02)


@torch.inference_mode()
def test_a_fused_block_reads_live_weights_and_the_last_token_alone(tiny_model):
    block = tiny_model().decoder.blocks[0]
    one, x = FusedBlock(block, EagerOps()), torch.randn(2, 5, WIDTH)
    cos, sin = rope_cos_sin(torch.arange(3, 8), tiny_model().cfg)
    head_dim, n_kv_heads = block.attn.head_dim, block.attn.n_kv_heads
    past = [torch.randn(2, n_kv_heads, 3, head_dim) for _ in range(2)]
    mask = build_attention_mask(torch.ones(2, 8), 5)
    block.mlp.up_proj.weight.mul_(1.5)
    block.attn.k_proj.weight.mul_(0.5)
    for last_only in (False, True):
        wanted, wanted_kv = block(x, cos, sin, mask, KVCache(*past), last_only)
        got, kv = one(x, cos, sin, mask, KVCache(*past), last_only)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kv.key, wanted_kv.key, rtol=1e-5, atol=1e-5)


def test_blocks_that_are_not_plain_stay_as_they_are(tiny_model):
    adapted, quantized, wide = tiny_model(), tiny_model(), tiny_model().double()
    adapt(adapted, 2, 4, ("decoder",))
    quantize_int8(quantized.decoder)
    for model in (adapted, quantized, wide):
        assert all(type(block) is not FusedBlock for block in fused(model).decoder.blocks)


def test_inference_models_fuse_their_own_blocks_only(tiny_model):
    model = tiny_model()
    network = InferenceModel(model).network
    assert all(type(block) is Block for block in model.decoder.blocks)
    for block, plain in zip(network.decoder.blocks, model.decoder.blocks):
        assert type(block) is FusedBlock
        assert list(block.state_dict()) == list(plain.state_dict())
        assert all(a is b for a, b in zip(block.parameters(), plain.parameters()))


def test_gradients_flow_through_fused_blocks(tiny_model):
    network, x = fused(tiny_model()), torch.randn(1, 5, WIDTH)
    network.decoder(x)[0].sum().backward()
    assert network.decoder.blocks[0].attn.k_proj.weight.grad.abs().sum() > 0


@torch.inference_mode()
def test_a_new_cache_holds_keys_and_values_alone(tiny_model):
    _, state = fused(tiny_model()).prefill_embeds(torch.randn(2, 9, WIDTH))
    assert all(kv.bytes_allocated == kv.bytes_used for kv in state.kv_cache)
