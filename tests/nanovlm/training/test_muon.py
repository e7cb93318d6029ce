"""Muon against the singular value decomposition, PyTorch's own implementation, and AdamW for what is no matrix."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nanovlm.errors import InputError
from nanovlm.training.config import TrainConfig
from nanovlm.training.optimizer import MUON_LR_SCALE, Muon, make_optimizer, orthogonalized

CFG = TrainConfig(
    max_steps=3, optimizer="muon", lr=1e-3, warmup_steps=0, decay=0, dtype="float32", num_workers=0, log_every=9
)


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_orthogonalized_matrix_has_the_singular_vectors_and_even_values(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    values = u.T @ orthogonalized(torch.stack([torch.ones(shape), matrix]))[1] @ v.T
    diagonal = values.diagonal()
    assert diagonal.min() > 0.5 and diagonal.max() < 1.35
    assert (values - diagonal.diag()).abs().max() < 0.1, "bfloat16 leaves a little between them"
    assert orthogonalized(torch.zeros(1, 3, 4)).abs().max() == 0


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_steps_are_those_of_torch():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(16, 40)) for _ in range(2))
    options = {"lr": 0.02, "weight_decay": 0.1}
    muon = Muon([{"params": [ours], "orthogonal": True}], fused=True, **options)
    muon.state[ours] = {"momentum": torch.zeros_like(ours)}
    reference = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(3):
        ours.grad = torch.randn(16, 40)
        theirs.grad = ours.grad.clone()
        muon.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)
    assert (ours - 1).abs().max() > 0.01


def test_linear_layers_learn_by_muon_and_all_else_by_adamw(tiny_model, make_batch):
    """One step: everything that is no Linear's matrix changes exactly as with AdamW alone."""
    models = {}
    for name in ("muon", "adamw"):
        model = models[name] = tiny_model()
        optimizer = make_optimizer(model, replace(CFG, optimizer=name))
        scales = {group["lr_scale"] for group in optimizer.param_groups}
        assert scales == ({1, MUON_LR_SCALE} if name == "muon" else {1})
        _, loss = model(**make_batch(0))
        loss.backward()
        optimizer.step()
    linear = {f"{name}.weight" for name, module in models["muon"].named_modules() if isinstance(module, nn.Linear)}
    linear.discard("decoder.head.weight")  # is the embedding
    other = dict(models["adamw"].named_parameters())
    assert len(linear) > 4 and len(other) > len(linear) + 4
    for name, weight in models["muon"].named_parameters():
        assert torch.equal(weight, other[name]) == (name not in linear), name


def test_an_overflow_in_float16_changes_no_matrix(tiny_model, make_batch):
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, scaler = make_optimizer(model, CFG), torch.amp.GradScaler("cpu", init_scale=2.0**100)
    _, loss = model(**make_batch(0))
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad.fill_(float("inf"))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_muon_needs_whole_matrices(tiny_model, make_batch, tmp_path):
    with pytest.raises(InputError, match="lora_rank"):
        replace(CFG, lora_rank=4)
    with pytest.raises(InputError, match="optimizer=sgd is none of adamw, muon"):
        replace(CFG, optimizer="sgd")
