"""GPT computes what transformers' GPT-2 computes, GPT_kv what GPT computes, and a cache is an immutable value.

The package is a drop-in for the KV-cache homework (github.com/dataflowr/llm_efficiency): what its checker and its
scripts call works here, with its tolerances.
"""

import copy
import json
import math
import random
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import mingpt
from models.mingpt import GPT, GPT_kv, GPTConfig, append_kv, next_token
from support import randomize

VOCAB_SIZE = 30


def make_pair(seed=0, **changes):
    shape = {"n_layer": 2, "n_head": 3, "n_embd": 12, "vocab_size": VOCAB_SIZE, "block_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        gpt = randomize(GPT(GPTConfig(**shape | changes))).eval()
    gpt_kv = GPT_kv(gpt.config).eval()
    gpt_kv.load_state_dict(gpt.state_dict())
    return gpt, gpt_kv


def read(gpt_kv, idx):
    return gpt_kv(idx, kv_cache=[None] * gpt_kv.n_layer)[2]


def ids(*shape, seed=0):
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("seed", range(30))
def test_a_cache_changes_neither_tokens_within_and_beyond_block_size_nor_logits_of_any_chunks(seed):
    rng = random.Random(seed)
    n_head = rng.randint(1, 3)
    sizes = {"n_layer": rng.randint(1, 3), "n_head": n_head, "n_embd": n_head * rng.randint(1, 4)}
    gpt, gpt_kv = make_pair(rng.randint(0, 9), block_size=rng.randint(1, 12), **sizes)
    B, T, n = rng.randint(1, 3), rng.randint(1, 15), rng.choice([0, 10, 10])
    options = {"temperature": rng.choice([0.5, 1.0, 2.0]), "do_sample": rng.random() < 0.5}
    options["top_k"] = rng.choice([None, rng.randint(1, VOCAB_SIZE + 5)])
    outputs = []
    for generate in (gpt.generate, gpt_kv.generate, gpt_kv.generate_kv):
        torch.manual_seed(7)
        outputs.append(generate(ids(B, T), n, **options))
    assert outputs[0].shape == (B, T + n) and torch.equal(outputs[0][:, :T], ids(B, T))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    T = gpt.block_size
    cuts = sorted({0, T, *rng.choices(range(T + 1), k=rng.randint(0, T))})
    with torch.set_grad_enabled(seed % 2 == 1):
        pieces, cache = [], [None] * gpt_kv.n_layer
        for start, end in pairwise(cuts):
            logits, loss, cache = gpt_kv(ids(B, T)[:, :end], kv_cache=cache)
            assert logits.shape == (B, end - start, VOCAB_SIZE) and loss is None and len(cache) == gpt_kv.n_layer
            assert all(k.shape == v.shape == (B, end, gpt.config.n_embd) for k, v in cache)
            pieces.append(logits)
        assert_close(torch.cat(pieces, dim=1), gpt(ids(B, T))[0])


@pytest.mark.parametrize("past", [0, 6])
def test_the_loss_covers_the_new_tokens_and_gradients_reach_the_cached_ones(past):
    gpt, gpt_kv = make_pair()
    idx, targets = ids(2, 9), ids(2, 9, seed=1)
    targets[0, :4] = -1
    loss_kv = gpt_kv(idx, targets, read(gpt_kv, idx[:, :past]) if past else None)[1]
    targets = targets.clone()
    targets[:, :past] = -1
    loss = gpt(idx, targets)[1]
    assert_close(loss_kv, loss)
    log_p = gpt(idx)[0].log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    assert_close(loss, -log_p[targets >= 0].mean())
    loss.backward(), loss_kv.backward()
    for p, p_kv in zip(gpt.parameters(), gpt_kv.parameters()):
        assert_close(p_kv.grad, p.grad)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_generate_kv_computes_each_token_once_and_the_last_one_not_at_all(n):
    _, gpt_kv = make_pair()
    embedded, projected = [], []
    gpt_kv.transformer.wte.register_forward_hook(lambda m, args, out: embedded.append(out.size(1)))
    gpt_kv.lm_head.register_forward_hook(lambda m, args, out: projected.append(out.numel() // VOCAB_SIZE))
    gpt_kv.generate_kv(ids(1, 5), n)
    assert embedded == [5] + [1] * (n - 1) and projected == [1] * n


@torch.no_grad()
def test_a_modified_cache_is_used_as_modified():
    gpt, gpt_kv = make_pair()
    idx, selected = ids(3, 8), torch.tensor([2, 0])
    for change in ("new list", "in place", "none"):
        cache = gpt_kv(idx[:, :6], kv_cache=read(gpt_kv, idx[:, :5]))[2]
        assert all(isinstance(block, mingpt.KVList) for block in cache)
        if change == "new list":
            cache = [[k[selected], v[selected]] for k, v in cache]
        elif change == "in place":
            for block in cache:
                block[0], block[1] = block[0][selected], block[1][selected]
        rows = torch.arange(3) if change == "none" else selected
        for grown in (cache, copy.deepcopy(cache)):
            for t in (7, 8):
                logits, _, grown = gpt_kv(idx[rows, :t], kv_cache=grown)
                assert_close(logits[:, -1], gpt(idx[rows, :t])[0][:, -1])
    for part in (0, 1):
        cache = append_kv([*torch.randn(2, 2, 3, 4)], *torch.randn(2, 2, 1, 4))
        cache[part] = torch.zeros(2, 4, 4)
        assert not append_kv(cache, *torch.ones(2, 2, 1, 4))[part][:, :4].any()


def test_names_and_sizes_are_mingpts_and_parameter_counts_the_published_ones():
    gpt, gpt_kv = (cls(GPTConfig("gpt-nano", vocab_size=5, block_size=7)) for cls in (GPT, GPT_kv))
    block = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    expected = {f"transformer.h.{i}.{name}.{kind}" for i in range(3) for name in block for kind in ("weight", "bias")}
    expected |= {f"transformer.h.{i}.attn.bias" for i in range(3)}
    expected |= {f"transformer.{name}" for name in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")}
    assert set(gpt.state_dict()) == expected | {"lm_head.weight"} == set(gpt_kv.state_dict())
    assert {size: mingpt.SIZES[size] for size in mingpt.SIZES if not size.startswith(("gpt2", "openai"))} == {
        "gopher-44m": (8, 16, 512), "gpt-mini": (6, 6, 192), "gpt-micro": (4, 4, 128), "gpt-nano": (3, 3, 48),
    }  # fmt: skip
    published = {"gpt2": 124.44, "gpt2-medium": 354.82, "gpt2-large": 774.03, "gpt2-xl": 1557.61, "openai-gpt": 124.44}
    for size, millions in published.items():  # as minGPT prints them, without lm_head
        with torch.device("meta"):
            gpt = GPT(GPTConfig(size, vocab_size=50257, block_size=1024))
        assert round(sum(p.numel() for p in gpt.transformer.parameters()) / 1e6, 2) == millions


def test_initialization_matches_mingpt():
    torch.manual_seed(0)
    config = GPT.get_default_config()  # minGPT's way to make one
    config.model_type, config.vocab_size, config.block_size = "gpt-micro", 500, 64
    for name, p in GPT_kv(config).named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "ln_" in name:
            assert (p == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 4) if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.05) and abs(p.mean().item()) < std / 20, name


@pytest.mark.parametrize("top_k", [None, 1, 3, 99])
def test_samples_follow_the_filtered_distribution(top_k):
    torch.manual_seed(0)
    logits = torch.tensor([2.0, -1.0, 0.5, 1.0, -3.0])
    samples = next_token(logits.expand(20000, -1), 0.7, True, top_k).flatten().bincount(minlength=5) / 20000
    expected = (logits / 0.7).exp()
    expected[logits.argsort(descending=True)[top_k or 5 :]] = 0
    torch.testing.assert_close(samples, expected / expected.sum(), atol=0.015, rtol=0)
    assert next_token(logits[None], 0.7, False, top_k).tolist() == [[0]]


# ---- GPT-2's weights ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A GPT with random weights and a tied head, and a folder with its weights as transformers names and lays them."""
    gpt, _ = make_pair()
    with torch.no_grad():
        gpt.lm_head.weight.copy_(gpt.transformer.wte.weight)
    tensors = {name: t for name, t in gpt.state_dict().items() if not name.endswith(".attn.bias")}
    del tensors["lm_head.weight"]
    transposed = {n: t.t().contiguous() for n, t in tensors.items() if ".c_" in n and n.endswith("weight")}
    save_file(tensors | transposed, (folder := tmp_path_factory.mktemp("gpt2")) / "model.safetensors", {"format": "pt"})
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": VOCAB_SIZE, "n_positions": 16}
    (folder / "config.json").write_text(json.dumps(config | {"n_embd": 12, "n_layer": 2, "n_head": 3}))
    return gpt, folder


def modified_copy(folder, new, change=lambda tensors: tensors, **settings):
    config = json.loads((folder / "config.json").read_text()) | settings
    (new / "config.json").write_text(json.dumps(config))
    save_file(change(load_file(folder / "model.safetensors")), new / "model.safetensors", {"format": "pt"})
    return str(new)


def hub_names(tensors):
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    return {name.removeprefix("transformer."): t for name, t in tensors.items()} | masks


@torch.no_grad()
@pytest.mark.parametrize("cls", [GPT, GPT_kv])
@pytest.mark.parametrize("change", [lambda tensors: tensors, hub_names], ids=["transformers names", "Hub names"])
def test_gpt2_loads_under_both_names_with_its_head_copied(gpt2, tmp_path, cls, change):
    ours = cls.from_pretrained(modified_copy(gpt2[1], tmp_path, change))
    assert not ours.training and type(ours) is cls and all(p.requires_grad for p in ours.parameters())
    assert_close(ours(ids(3, 16))[0], gpt2[0](ids(3, 16))[0])
    assert ours.lm_head.weight.data_ptr() != ours.transformer.wte.weight.data_ptr()
    head = torch.randn(VOCAB_SIZE, 12)
    untied = cls.from_pretrained(modified_copy(gpt2[1], tmp_path, lambda t: change(t) | {"lm_head.weight": head}))
    assert torch.equal(untied.lm_head.weight, head)


@pytest.mark.full
@torch.no_grad()
def test_gpt2_matches_transformers(gpt2):
    theirs = pytest.importorskip("transformers").GPT2LMHeadModel.from_pretrained(gpt2[1]).eval()
    ours = GPT_kv.from_pretrained(gpt2[1])
    assert_close(ours(ids(3, 16))[0], theirs(ids(3, 16)).logits)
    options = {"attention_mask": torch.ones(3, 5, dtype=torch.long), "eos_token_id": None}
    expected = theirs.generate(ids(3, 5), max_new_tokens=11, do_sample=False, **options)
    assert torch.equal(ours.generate(ids(3, 5), 11), expected)
    assert torch.equal(ours.generate_kv(ids(3, 5), 11), expected)


@pytest.mark.parametrize(("name", "repo_id"), [("gpt2-xl", "openai-community/gpt2-xl"), ("me/mine", "me/mine")])
def test_a_name_is_downloaded_from_the_hub(gpt2, hub, name, repo_id):
    hub[repo_id, None] = gpt2[1]
    assert GPT_kv.from_pretrained(name).config.n_layer == 2
    assert hub.calls == [(repo_id, None, ["config.json", "model*.safetensors*"])]


@pytest.mark.parametrize(
    ("tensors", "setting", "message"),
    [
        ({"score.weight": torch.ones(2)}, {}, "score.weight"),
        ({"transformer.wpe.weight": torch.ones(8, 12)}, {}, "wpe.weight.*8, 12.*16, 12"),
        ({}, {"model_type": "llama"}, "model_type=llama, but .* gpt2"),
        ({}, {"activation_function": "relu"}, "activation_function=relu, but .*gelu"),
        ({}, {"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon=0.001, but .* 1e-05"),
        ({}, {"n_inner": 20}, "n_inner=20, but .* 48"),
        ({}, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({}, {"n_head": 5}, "n_embd=12 is not a multiple of n_head=5"),
    ],
)
def test_an_incompatible_checkpoint_raises_a_one_line_error(gpt2, tmp_path, tensors, setting, message):
    with pytest.raises(ValueError, match=message) as error:
        GPT.from_pretrained(modified_copy(gpt2[1], tmp_path, lambda stored: stored | tensors, **setting))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@torch.no_grad()
def test_invalid_arguments_raise():
    gpt, gpt_kv = make_pair()
    cache = read(gpt_kv, ids(2, 5))
    for call, message in (
        (lambda: gpt(ids(2, 17)), "idx holds 17 tokens, but block_size=16"),
        (lambda: gpt_kv(ids(2, 17), kv_cache=cache), "idx holds 17 tokens, but block_size=16"),
        (lambda: gpt.generate(ids(2, 0), 1), "idx holds 0 tokens"),
        (lambda: gpt_kv.generate_kv(ids(2, 0), 1), "idx holds 0 tokens"),
        (lambda: gpt_kv(ids(2, 5), kv_cache=cache), "idx is (2, 5), but the cache holds (2, 5) tokens"),
        (lambda: gpt_kv(ids(1, 6), kv_cache=cache), "idx is (1, 6), but the cache holds (2, 5) tokens"),
        (lambda: gpt_kv(ids(2, 6), kv_cache=cache[:1]), "kv_cache has 1 blocks, but the model 2"),
        (lambda: gpt_kv(ids(2, 6), kv_cache=[]), "kv_cache has 0 blocks, but the model 2; [None] * n_layer"),
        (lambda: gpt_kv(ids(2, 6), kv_cache=[None, cache[1]]), "kv_cache is empty for some of 2 blocks only"),
        (lambda: gpt.generate(ids(1, 3), 1, temperature=0), "temperature=0 must be above 0"),
        (lambda: gpt_kv.generate_kv(ids(1, 3), 1, top_k=0), "top_k=0 must be 1 or more"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


# ---- the homework's checker and scripts -----------------------------------------------------------------------------


def course_config(**changes):
    """minGPT's default config with changes, as its callers see it: attributes and nothing that this project knows."""
    unset = dict.fromkeys(("n_layer", "n_head", "n_embd", "vocab_size", "block_size"))
    dropout = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    return SimpleNamespace(**{"model_type": "gpt"} | unset | dropout | changes)


HOMEWORK = {"model_type": None, "n_layer": 3, "n_head": 3, "n_embd": 48, "vocab_size": 5, "block_size": 20}


@torch.no_grad()
@pytest.mark.parametrize("name", ["CausalSelfAttention", "Block"])
def test_a_layer_equals_minGPTs_and_continues_token_by_token_and_from_slices(name):
    config = mingpt.Config()
    x = torch.randn(4, config.block_size, config.n_embd, generator=torch.Generator().manual_seed(42))
    plain, cached = (getattr(mingpt, kind)(config).eval() for kind in (name, f"{name}_kv"))
    cached.load_state_dict(randomize(plain).state_dict())
    expected, (k, v) = cached(x)
    assert_close(expected, plain(x))
    projected = cached.c_attn(x) if name == "CausalSelfAttention" else cached.attn.c_attn(cached.ln_1(x))
    for tensor, part in zip((k, v), projected.split(x.size(2), dim=2)[1:]):  # before heads are split
        torch.testing.assert_close(tensor, part)
    last, _ = cached(x[:, [-1]], kv_cache=[k[:, :-1], v[:, :-1]])
    assert_close(last[:, 0], expected[:, -1], 1e-4)
    kv_cache = None
    for t in range(x.size(1)):
        y, kv_cache = cached(x[:, [t]], kv_cache=kv_cache)
        assert_close(y[:, 0], expected[:, t], 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("config", [GPTConfig(**HOMEWORK), course_config(**HOMEWORK)], ids=["ours", "CfgNode"])
def test_compute_first_fills_a_stale_cache_anew(config):
    gpt_kv, idx = randomize(GPT_kv(config)).eval(), torch.randint(5, (2, 7))
    empty = [None] * config.n_layer
    expected, _, fresh = gpt_kv(idx, kv_cache=empty, compute_first=True)
    assert_close(gpt_kv(idx, compute_first=True)[0], expected)
    _, _, stale = gpt_kv(idx[:, :2], kv_cache=empty, compute_first=True)
    logits, _, kv_cache = gpt_kv(idx, kv_cache=stale, compute_first=True)
    assert_close(logits, expected)
    assert_close(kv_cache, fresh)
    assert empty == [None] * config.n_layer


@pytest.mark.parametrize("model_class", [GPT, GPT_kv])
@pytest.mark.parametrize("make_config", [course_config, GPTConfig], ids=["CfgNode", "ours"])
def test_the_sizes_of_model_type_are_written_into_the_config(model_class, make_config):
    config = make_config(model_type="gpt-nano", vocab_size=3, block_size=11)
    for _ in range(2):  # the same config makes a second model
        assert len(model_class(config).transformer.h) == model_class(config).n_layer == 3
        assert (config.n_layer, config.n_head, config.n_embd) == (3, 3, 48)


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
        GPT_kv(course_config(**{"vocab_size": 5, "block_size": 20} | changes))


def test_only_weights_of_linear_layers_decay():
    model = GPT_kv(GPTConfig(**HOMEWORK))
    train_config = SimpleNamespace(learning_rate=3e-3, betas=(0.9, 0.95), weight_decay=0.1)  # minGPT's
    optimizer = model.configure_optimizers(train_config)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 3e-3 and optimizer.defaults["betas"] == (0.9, 0.95)
    decayed, others = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decayed == {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    assert decayed | others == {id(p) for p in model.parameters()} and not decayed & others
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
