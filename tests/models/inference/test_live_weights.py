"""Shared modules use the same parameters, and a fingerprint notices every change of a module tree."""

import pytest
import torch
from torch import nn

from models.inference.live_weights import Fingerprint, share_modules


def test_shared_modules_are_new_and_their_parameters_are_not(tiny_model):
    model = tiny_model()
    shared = share_modules(model)
    assert type(shared) is type(model) and shared.state_dict().keys() == model.state_dict().keys()
    for (name, a), (_, b) in zip(
        model.named_parameters(remove_duplicate=False), shared.named_parameters(remove_duplicate=False)
    ):
        assert a is b, name
    assert not set(model.modules()) & set(shared.modules())
    shared.decoder.head = nn.Identity()
    shared.train()
    assert isinstance(model.decoder.head, nn.Linear) and not model.training and not model.decoder.training


def test_a_module_used_twice_is_shared_once():
    linear = nn.Linear(2, 2)
    shared = share_modules(nn.Sequential(linear, linear))
    assert shared[0] is shared[1] is not linear


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "only_values"),
    [
        (lambda m: m.mlp.__setattr__("up_proj", nn.Linear(24, 32, bias=False)), False),
        (lambda m: m.mlp.up_proj.__setattr__("weight", nn.Parameter(torch.ones(32, 24))), False),
        (lambda m: m.mlp.up_proj.__setattr__("bias", nn.Parameter(torch.ones(32))), False),
        (lambda m: m.mlp.__delattr__("up_proj"), False),
        (lambda m: m.add_module("extra", nn.Linear(1, 1)), False),
        (lambda m: m.bfloat16(), False),
        (lambda m: m.mlp.up_proj.weight.__setattr__("data", torch.ones(32, 24)), False),
        (lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True), False),
        (lambda m: m.mlp.up_proj.weight.add_(1), True),
        (lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}), True),
    ],
)
def test_changes_are_noticed(tiny_model, change, only_values):
    block = tiny_model().decoder.blocks[0]
    structure, values = Fingerprint(block), Fingerprint(block, values=True)
    assert structure.matches() and values.matches()
    change(block)
    assert structure.matches() == only_values and not values.matches()
