"""models.mingpt is a drop-in for the KV-cache homework (github.com/dataflowr/llm_efficiency): what its checker and its
scripts call works here, with its tolerances; eval.sort_task trains as minGPT's Trainer does."""

from types import SimpleNamespace

import pytest
import torch

from models.mingpt import GPT, Block, Block_kv, CausalSelfAttention, CausalSelfAttention_kv, Config, GPT_kv, GPTConfig
from support import randomize

TWINS = [(CausalSelfAttention, CausalSelfAttention_kv), (Block, Block_kv)]


def mingpt_config(**changes):
    """minGPT's default config with changes, as its callers see it: attributes and nothing that this project knows."""
    unset = dict.fromkeys(("n_layer", "n_head", "n_embd", "vocab_size", "block_size"))
    dropout = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    return SimpleNamespace(**{"model_type": "gpt"} | unset | dropout | changes)


def homework_config():
    """Made as the checker does, by assigning to the default config."""
    config = GPT.get_default_config()
    config.model_type = None
    config.n_layer, config.n_head, config.n_embd = 3, 3, 48
    config.vocab_size, config.block_size = 5, 20
    return config


@pytest.fixture(params=[homework_config, lambda: mingpt_config(**vars(homework_config()))], ids=["ours", "CfgNode"])
def config(request):
    return request.param()


@pytest.fixture
def idx():
    return torch.randint(5, (2, 7), generator=torch.Generator().manual_seed(42))


@pytest.fixture
def x():
    return torch.randn(4, Config().block_size, Config().n_embd, generator=torch.Generator().manual_seed(42))


# ---- the checker: attention and block --------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(("plain_class", "cached_class"), TWINS)
def test_a_layer_equals_minGPTs_and_continues_token_by_token_and_from_slices(plain_class, cached_class, x):
    plain, cached = randomize(plain_class(Config())).eval(), cached_class(Config()).eval()
    cached.load_state_dict(plain.state_dict())
    expected, (k, v) = cached(x)
    torch.testing.assert_close(expected, plain(x), atol=1e-5, rtol=0)
    projected = cached.c_attn(x) if isinstance(cached, CausalSelfAttention) else cached.attn.c_attn(cached.ln_1(x))
    for tensor, part in zip((k, v), projected.split(x.size(2), dim=2)[1:]):  # before heads are split
        torch.testing.assert_close(tensor, part)
    last, _ = cached(x[:, [-1]], kv_cache=[k[:, :-1], v[:, :-1]])
    torch.testing.assert_close(last[:, 0], expected[:, -1], atol=1e-4, rtol=0)
    kv_cache = None
    for t in range(x.size(1)):
        y, kv_cache = cached(x[:, [t]], kv_cache=kv_cache)
        torch.testing.assert_close(y[:, 0], expected[:, t], atol=1e-4, rtol=0)


# ---- the checker: the model ------------------------------------------------------------------------------------------


@torch.no_grad()
def test_compute_first_fills_a_stale_cache_anew(config, idx):
    gpt_kv = randomize(GPT_kv(config)).eval()
    empty = [None] * config.n_layer
    expected, _, fresh = gpt_kv(idx, kv_cache=empty, compute_first=True)
    torch.testing.assert_close(gpt_kv(idx, compute_first=True)[0], expected, atol=1e-5, rtol=0)
    _, _, stale = gpt_kv(idx[:, :2], kv_cache=empty, compute_first=True)
    logits, _, kv_cache = gpt_kv(idx, kv_cache=stale, compute_first=True)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(kv_cache, fresh, atol=1e-5, rtol=0)
    assert empty == [None] * config.n_layer


# ---- the scripts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_class", [GPT, GPT_kv])
@pytest.mark.parametrize("make_config", [mingpt_config, GPTConfig], ids=["CfgNode", "ours"])
def test_the_sizes_of_model_type_are_written_into_the_config(model_class, make_config):
    """The scripts make a cache of `[None] * config.n_layer` after they have made the model."""
    config = make_config(model_type="gpt-nano", vocab_size=3, block_size=11)
    model = model_class(config)
    assert (config.n_layer, config.n_head, config.n_embd) == (3, 3, 48) and model.n_layer == len(model.transformer.h)
    assert model_class(config).n_layer == 3, "the same config makes a second model"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "model_type=gpt is not one of openai-gpt"),  # minGPT's default, which no size goes by
        ({"model_type": None}, "n_layer=None; pass a positive number"),
        ({"model_type": "gpt-nano", "n_layer": 2, "n_head": 2, "n_embd": 8}, "n_layer=2, but gpt-nano has 3"),
        ({"model_type": "gpt-nano", "vocab_size": None}, "vocab_size=None"),
        ({"model_type": None, "n_layer": 2, "n_head": 3, "n_embd": 8}, "n_embd=8 is not a multiple of n_head=3"),
    ],
)
def test_where_minGPT_asserts_a_config_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        GPT_kv(mingpt_config(**{"vocab_size": 5, "block_size": 20} | changes))


TRAIN_CONFIG = SimpleNamespace(learning_rate=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def test_only_weights_of_linear_layers_decay():
    model = GPT_kv(homework_config())
    optimizer = model.configure_optimizers(TRAIN_CONFIG)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 3e-3 and optimizer.defaults["betas"] == (0.9, 0.95)
    decayed, others = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decayed == {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    assert decayed | others == {id(p) for p in model.parameters()} and not decayed & others
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
