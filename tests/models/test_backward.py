"""The backward passes that are written out, against autograd's of the plain formulas, in float64 and float32."""

import pytest
import torch

from models import language_model
from models.backward import RMSNormFunction, RotationFunction
from models.config import VLMConfig
from models.language_model import apply_rope, rope_cos_sin


def gradients(output, inputs):
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    return torch.autograd.grad((output * weights).sum(), inputs)


def test_rms_norm_equals_the_formula():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 12, requires_grad=True), torch.rand(12, requires_grad=True)
    plain = weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    ours = RMSNormFunction.apply(x, weight, 1e-5)
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-6)
    for gradient, expected in zip(gradients(ours, (x, weight)), gradients(plain, (x, weight))):
        torch.testing.assert_close(gradient, expected, atol=2e-6, rtol=1e-5)


def test_a_frozen_norm_gets_no_gradient():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    RMSNormFunction.apply(x, weight, 1e-5).sum().backward()
    assert weight.grad is None and x.grad.abs().max() < 10


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_the_formula(monkeypatch, batched, dtype):
    torch.manual_seed(0)
    cfg = VLMConfig(lm_hidden_dim=32, lm_n_heads=4, lm_n_kv_heads=2)
    positions = torch.tensor([[0, 1, 2], [5, 0, 9]])[:, None] if batched else torch.arange(3)
    cos, sin = rope_cos_sin(positions, cfg)
    x = torch.randn(2, 3, 4, 8, dtype=dtype).transpose(1, 2).requires_grad_()  # as a block makes it
    ours = apply_rope(x, cos, sin)
    monkeypatch.setattr(language_model, "is_faster_written_out", lambda x: False)
    plain = apply_rope(x, cos, sin)
    assert isinstance(ours.grad_fn, RotationFunction._backward_cls) and ours.dtype == dtype
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(ours, plain, **tolerance)
    torch.testing.assert_close(gradients(ours, (x,))[0], gradients(plain, (x,))[0], **tolerance)
