"""Training's functions for the CPU compute what the core's do, forward and backward, and leave the model as it was."""

import pytest
import torch

from models.attention import attention
from models.language_model import rms_norm
from nanovlm.training.cpu_ops import cpu_ops, matmul_attention, written_out_rms_norm


def gradients(output, inputs):
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    return torch.autograd.grad((output * weights).sum(), inputs)


def test_rms_norm_equals_the_formula():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 12, requires_grad=True), torch.rand(12, requires_grad=True)
    plain, ours = rms_norm(x, weight, 1e-5), written_out_rms_norm(x, weight, 1e-5)
    assert type(ours.grad_fn) is not type(plain.grad_fn)
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradients(ours, (x, weight)), gradients(plain, (x, weight)), atol=2e-6, rtol=1e-5)


def test_a_frozen_norm_gets_no_gradient():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    written_out_rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.grad is None and x.grad.abs().max() < 10


@pytest.mark.parametrize("kind", ["plain", "causal", "masked"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention_in_bfloat16_matches_float32(kind, groups):
    torch.manual_seed(1)
    q, k, v = (torch.randn(3, heads, 24, 16).bfloat16().requires_grad_() for heads in (4, groups, groups))
    mask = torch.rand(3, 1, 24, 24) < 0.6
    mask[..., 0] = True
    arguments = mask if kind == "masked" else None, kind == "causal"
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    ours, plain = matmul_attention(q, k, v, *arguments), attention(*wide, *arguments)
    assert ours.dtype == torch.bfloat16 and (ours - plain).norm() < 0.02 * plain.norm()
    for gradient, expected in zip(gradients(ours, (q, k, v)), gradients(plain, wide)):
        assert (gradient - expected).norm() < 0.02 * expected.norm()


def test_the_model_computes_with_them_within_the_context_only(tiny_model, make_batch):
    model, batch = tiny_model(), make_batch(0)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    model(**batch)[1].backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with cpu_ops(model):
        assert model.decoder.norm.normalize is written_out_rms_norm
        assert model.vision_encoder.blocks[0].attn.attend is matmul_attention
        model(**batch)[1].backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted, rtol=1e-4, atol=1e-6)
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert after["decoder.norm"]["normalize"] is before["decoder.norm"]["normalize"] is rms_norm
    assert after["decoder.blocks.0.attn"]["attend"] is attention
