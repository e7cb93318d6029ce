"""Adapters are PEFT's, on disk and in what they compute, and merging them leaves a plain model that says the same."""

import json
import math
import os
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.lib.random_model import SHAPES
from models.checkpoint import load_config
from models.common.errors import CheckpointError
from models.lora import EMBEDDINGS, PARTS, adapt, adapters, fully_trained, merge, merged_state
from models.lora.files import adapter_folder, read_adapters, write_adapters
from models.vision_language_model import load_model
from nanovlm.captioner import Captioner
from nanovlm.errors import UsageError
from support import Package, noise_image
from support.smolvlm import their_inputs, write_folder
from support.training import CFG, train

peft, transformers = Package("peft"), Package("transformers")
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("parts", [PARTS, ("decoder",), ("vision_encoder", "MP")], ids=str)
def test_an_adapter_changes_nothing_until_its_parts_are_trained(tiny_model, make_batch, parts, embeddings, tied):
    model, batch = tiny_model(lm_tie_weights=tied), make_batch(0)
    before = model(**batch)[0]
    adapt(model, 2, 4, parts, embeddings)
    linear = {name for name, module in tiny_model().named_modules() if isinstance(module, torch.nn.Linear)}
    assert adapters(model).keys() == {n for n in linear - {"decoder.head"} if n.startswith(parts)}
    known = {f"{name}.weight" for name in EMBEDDINGS} if embeddings and "decoder" in parts else set()
    assert fully_trained(model).keys() == known
    logits, loss = model(**batch)
    assert torch.equal(logits, before)
    loss.backward()
    for name, p in model.named_parameters(remove_duplicate=False):
        assert (p.grad is not None) == p.requires_grad == (".lora_" in name or name in known)


@torch.no_grad()
def test_a_merged_model_is_plain_and_computes_the_same(adapted, tiny_model, make_batch):
    model, batch = adapted(), make_batch(0)
    plain = merge(model)
    assert not adapters(plain) and plain.state_dict().keys() == tiny_model().state_dict().keys()
    exact = adapted().double()  # float32 rounds too much to tell a merge that is nearly right
    double = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    torch.testing.assert_close(merge(exact)(**double)[0], exact(**double)[0], atol=1e-9, rtol=1e-9)
    assert not torch.allclose(plain(**batch)[0], tiny_model()(**batch)[0], atol=1e-2)
    assert plain.decoder.head.weight is plain.decoder.token_embedding.weight
    assert plain.decoder.head.weight.data_ptr() == model.decoder.head.weight.data_ptr()  # shared, not copied
    wanted, layers = plain.state_dict(), adapters(model).values()
    for name, weight in merged_state(model, consume=True):
        assert torch.equal(weight, wanted.pop(name))
    assert not wanted and layers and all(layer.weight is None for layer in layers)


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_embeddings_trained_by_peft_are_read_and_written_alike(tiny_model, make_batch, tmp_path, tied):
    trained = {"target_modules": ["q_proj", "fc1", "proj"], "modules_to_save": list(EMBEDDINGS)}
    cfg = peft.LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, **trained)
    theirs, batch = peft.get_peft_model(tiny_model(lm_tie_weights=tied), cfg).eval(), make_batch(0)
    embeddings = [theirs.get_submodule(f"base_model.model.{name}.modules_to_save.default") for name in EMBEDDINGS]
    for i, module in enumerate(embeddings):
        module.weight.add_(torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(i * (not tied))))
    theirs.save_pretrained(tmp_path)
    read_adapters(tmp_path, ours := tiny_model(lm_tie_weights=tied))
    torch.testing.assert_close(ours(**batch)[0], theirs(**batch)[0], **CLOSE)
    (tmp_path / "ours").mkdir()
    write_adapters(tmp_path / "ours", ours)
    again, before = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "ours", tmp_path))
    assert again.keys() == before.keys() and all(torch.equal(again[name], before[name]) for name in before)
    loaded = peft.PeftModel.from_pretrained(tiny_model(lm_tie_weights=tied), tmp_path / "ours").merge_and_unload()
    torch.testing.assert_close(loaded(**batch)[0], (plain := merge(ours))(**batch)[0], **CLOSE)
    assert (plain.decoder.head.weight is plain.decoder.token_embedding.weight) == tied
    config = peft.LoraConfig(r=2, target_modules=["head"])
    peft.get_peft_model(tiny_model(), config).save_pretrained(tmp_path)
    read_adapters(tmp_path, tiny_model(lm_tie_weights=False))
    with pytest.raises(CheckpointError, match="adapts the head, which is the token embedding, too"):
        read_adapters(tmp_path, tiny_model())


@torch.no_grad()
@pytest.mark.parametrize("embeddings", [True, False])
def test_round_trip_is_bit_exact(adapted, tiny_model, make_batch, tmp_path, embeddings):
    write_adapters(tmp_path, model := adapted(embeddings=embeddings))
    adapt(empty := tiny_model(), 3, 12.0, embeddings=embeddings)
    for again in (empty, tiny_model()):
        read_adapters(tmp_path, again)
        assert torch.equal(again(**make_batch(0))[0], model(**make_batch(0))[0])
        pairs = zip(again.named_parameters(), model.named_parameters(), strict=True)
        assert all((name, p.requires_grad) == (other, q.requires_grad) for (name, p), (other, q) in pairs)
    message = r"decoder\.\w+\.weight which this model does not train" if embeddings else r"embedding\.weight is missing"
    with pytest.raises(CheckpointError, match=message):
        read_adapters(tmp_path, adapted(embeddings=not embeddings))


@pytest.mark.parametrize("apart", [False, True])
@torch.no_grad()
def test_adapters_of_q_k_and_v_are_one_of_our_qkv(adapted, tiny_model, tmp_path, apart):
    format = SHAPES["SmolVLM-256M"][0].format  # which stores q, k and v apart
    write_adapters(tmp_path, adapted(("vision_encoder",), format=format))
    state = load_file(path := adapter_folder(tmp_path) / "adapter_model.safetensors")
    if apart:
        state = {name: 2 * tensor if "k_proj.lora_A" in name else tensor for name, tensor in state.items()}
        save_file(state, path)
    read_adapters(tmp_path, model := tiny_model(format=format))
    layer = adapters(model)["vision_encoder.blocks.0.attn.qkv_proj"]
    (prefix,) = {name.partition("q_proj")[0] for name in state if "layers.0.self_attn.q_proj" in name}
    parts = [state[f"{prefix}{x}_proj.lora_B.weight"] @ state[f"{prefix}{x}_proj.lora_A.weight"] for x in "qkv"]
    assert layer.rank == (9 if apart else 3)
    torch.testing.assert_close(layer.merged() - layer.weight, torch.cat(parts) * 12 / 3, **CLOSE)


TUNED = {  # target_modules and more, of what people train with PEFT on transformers' models
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "a regex": {"target_modules": r".*text_model.*\.(up|down)_proj", "init_lora_weights": "gaussian"},
    "but not the eyes": {"target_modules": ["k_proj", "o_proj", "fc1"], "exclude_modules": r".*vision_model.*k_proj"},
    "with the head": {"target_modules": ["proj", "lm_head"], "modules_to_save": ["embed_tokens", "post_layernorm"]},
}


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smolvlm")
    _, processor = write_folder(folder)
    return folder, their_inputs(processor, [noise_image(70, 40)], ["What is this?"])


@pytest.mark.full
@pytest.mark.parametrize("settings", TUNED.values(), ids=TUNED)
@torch.no_grad()
def test_adapters_that_peft_trains_on_transformers_models_are_merged_and_exported(smolvlm, tmp_path, settings):
    folder, inputs = smolvlm
    read = transformers.SmolVLMForConditionalGeneration.from_pretrained
    torch.manual_seed(0)
    theirs = peft.get_peft_model(read(folder, dtype=torch.float32), peft.LoraConfig(r=2, lora_alpha=6, **settings))
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * (0.3 if "lora_" in name else 0.05)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = theirs.eval()(**inputs).logits
    captioner = Captioner.from_pretrained(folder, "cpu", "float32", adapter=tmp_path / "adapter")
    plain, _ = Captioner.from_pretrained(folder, "cpu", "float32").model(inputs["input_ids"], inputs["pixel_values"][0])
    captioner.save_pretrained(tmp_path / "merged")
    again, largest = read(tmp_path / "merged", dtype=torch.float32).eval(), expected.abs().max()
    for logits in (captioner.model(inputs["input_ids"], inputs["pixel_values"][0])[0], again(**inputs).logits):
        assert (logits - expected).abs().max() <= 1e-4 * largest < 1e-2 * (plain - expected).abs().max()


HEAD_A, BLOCK = "MP.proj.lora_A", "decoder.blocks.1.attn.v_proj.lora_{}"
REFUSED = {  # changes of the config, of tensors (None removes one), and of the model; the message
    **{
        f"{key}={value!r}": ({key: value}, {}, {}, re.escape(f"{key}={value!r} is not supported"))
        for key, value in {
            "use_dora": True, "peft_type": "IA3", "rank_pattern": {"q_proj": 9}, "bias": "all",
            "init_lora_weights": "pissa", "some_future_key": 3, "fan_in_fan_out": True,
        }.items()
    },
    "olora": ({"init_lora_weights": "olora"}, {}, {}, "only True"),
    **{
        f"{key}={value!r:.9}": ({key: value}, {}, {}, words)
        for words, key, values in (
            ("are not a rank and", "lora_alpha", (math.nan, math.inf, -math.inf, 10**400, "1", True, None, [1])),
            ("are not a rank and", "r", (0, -1, 2.0, True, None, [3])),
            ("target_modules=.* is neither a text nor", "target_modules", (5, [5], {"a": 1}, True)),
            ("exclude_modules=.* is no regular expression", "exclude_modules", ("(", "*")),
        )
        for value in values
    },
    "a pipe": ({}, {}, {}, "adapter_model.safetensors is a pipe or a device, not a file"),
    "rank": ({"r": "many"}, {}, {}, "r=many"),
    "another rank": ({"r": 4}, {}, {}, r"lora_A.weight is \(3, \d+\), not \(4, \d+\)"),
    "nan": ({}, {HEAD_A: lambda t: t * math.nan}, {}, "values from nan to nan, but weights must be finite"),
    "integers": ({}, {HEAD_A: lambda t: t.int()}, {}, "stored as torch.int32"),
    "half an adapter": ({}, {HEAD_A: lambda t: None}, {}, r"MP.proj.lora_A.weight is missing, not \(3, 64\)"),
    "a block": ({}, {BLOCK.format(x): lambda t: None for x in "AB"}, {}, "1.attn.v_proj.lora_A.weight is missing"),
    "fewer blocks": ({}, {}, {"lm_n_blocks": 1}, r"adapts decoder\.blocks\.1\..*, which this model does not have"),
    "one of a tied pair": ({}, {"token_embedding": lambda t: t + 1}, {}, "has different weights for .* tied"),
    "another vocabulary": ({}, {}, {"lm_vocab_size": 41}, r"embedding.weight is \(40, 24\), not \(41, 24\)"),
    "no config": (None, {}, {}, r"has no adapter_config\.json"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_adapters_raise_in_one_line(adapted, tiny_model, tmp_path, config, tensors, changes, message):
    write_adapters(tmp_path, adapted(embeddings=True))
    path, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    state = load_file(weights)
    for name, change in tensors.items():
        (found,) = [one for one in state if name in one]
        value = change(state.pop(found))
        state |= {} if value is None else {found: value}
    save_file(state, weights)
    if config is None:
        path.unlink()
    if "a pipe" in message:
        weights.unlink()
        os.mkfifo(weights)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapters(tmp_path, tiny_model(**changes))
    assert len(str(caught.value).splitlines()) == 1 and str(tmp_path) in str(caught.value)


def test_invalid_ranks_and_parts_raise(tiny_model, adapted):
    for model, arguments, message in (
        (adapted(), (2, 4), "merge them first"),
        (tiny_model(), (0, 4), "rank=0"),
        (tiny_model(), (25, 4), "rank=25 is more than 24"),
        (tiny_model(), (2, 4, ["head"]), "head: not a part"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt(model, *arguments)


@torch.no_grad()
def test_training_writes_a_plain_model_and_its_adapters(tiny_model, make_batch, tmp_path):
    cfg = replace(CFG, max_steps=3, lr=1e-2, warmup_steps=0, decay=0, lora_rank=2, freeze=["vision"])
    trained, batch = train(tiny_model(), "{}", make_batch, cfg, tmp_path), make_batch(9)
    read = load_model(tmp_path, load_config(tmp_path), 3)
    assert torch.equal(read(**batch)[0], trained(**batch)[0])
    read_adapters(tmp_path, again := tiny_model())
    assert {name.split(".")[0] for name in adapters(again)} == {"MP", "decoder"}
    torch.testing.assert_close(again(**batch)[0], read(**batch)[0], **CLOSE)
    assert not torch.allclose(read(**batch)[0], tiny_model()(**batch)[0], atol=1e-2)
    moments = load_file(tmp_path / "checkpoints/step-3/optimizer.safetensors")
    kinds = {key.rpartition("/")[0] for key in moments if ".lora_" not in key}
    assert kinds == {"decoder.token_embedding.weight"}, "tied to the head"
    with pytest.raises(UsageError, match="start from the same model as before"), torch.enable_grad():
        train(tiny_model(seed=1), "{}", make_batch, cfg, tmp_path)
