"""Training's attention for the CPU computes what the core's does, and leaves the model as it was."""

import pytest
import torch

from models.attention import attention
from nanovlm.training.cpu_ops import matmul_attention


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
    weights = torch.linspace(-1, 1, plain.numel()).view(plain.shape)
    for x, exact in zip((q, k, v), wide):
        (gradient,) = torch.autograd.grad((ours * weights).sum(), x, retain_graph=True)
        (expected,) = torch.autograd.grad((plain * weights).sum(), exact, retain_graph=True)
        assert (gradient - expected).norm() < 0.02 * expected.norm()
