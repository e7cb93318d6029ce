"""Training's attention for the CPU computes what the core's does, and leaves the model as it was."""

import pytest
import torch

from models.attention import attention
from nanovlm.training.cpu_ops import cpu_ops, matmul_attention


def gradients(output, inputs):
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    return torch.autograd.grad((output * weights).sum(), inputs)


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


def test_the_model_computes_with_it_within_the_context_only(tiny_model, make_batch):
    model, batch = tiny_model(), make_batch(0)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    model(**batch)[1].backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with cpu_ops(model):
        assert model.vision_encoder.blocks[0].attn.attend is matmul_attention
        model(**batch)[1].backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted, rtol=1e-4, atol=1e-6)
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert after["decoder.blocks.0.attn"]["attend"] is before["decoder.blocks.0.attn"]["attend"] is attention
