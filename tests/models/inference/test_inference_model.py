"""InferenceModel generates what its model generates, never changes it, and follows its live weights."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

from models.errors import InputError, NanoVLMError
from models.inference import cpu_kernels
from models.inference.inference_model import InferenceModel
from models.inference.int4 import Int4Linear, int4_gemv, kernel_layout
from models.lora import adapt, adapters, merge, read_adapters, write_adapters
from models.vision_language_model import VisionLanguageModel
from support.generation import only_row, prompt

IDS, IMAGES = (
    torch.tensor([[5, 3, 3, 3, 3, 7, 9]]),
    torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)),
)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SHAPES = [{}, {"lm_tie_weights": False}, {"lm_attn_scaling": 0.5}, {"lm_n_kv_heads": 6}]


def logits_of(model, n=6):
    """Logits of a prefill and n decode steps, which continue it with fixed tokens: (n + 1, vocabulary) float32."""
    with torch.inference_mode():
        logits, prefix = model.prefill(IDS, IMAGES.to(model.dtype))
        rows = [logits]
        for token in range(8, 8 + n):
            logits, prefix = model.decode(torch.tensor([token]), prefix)
            rows.append(logits)
    return torch.cat(rows).float()


def assert_same(inference, plain, tolerance=None):
    """Both models give the same logits, up to rounding in their precision."""
    got, wanted = logits_of(inference), logits_of(plain)
    tolerance = tolerance or (1e-4 if plain.dtype == torch.float32 else 0.05)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * max(1.0, wanted.abs().max().item()))


@pytest.fixture
def wide_model(tiny_model):
    """A model whose matrices can all be int4, and q, k and v, and gate and up, one product."""
    sizes = {"lm_hidden_dim": 128, "lm_inter_dim": 192, "lm_n_heads": 4, "lm_n_kv_heads": 2, "lm_tie_weights": False}
    return lambda: tiny_model(**sizes)


@pytest.fixture(params=["private", "public"], autouse=True)
def kernels(request, monkeypatch):
    """Every test runs with torch's private kernels on all linear layers, and with the public fallbacks."""
    monkeypatch.setenv("NANOVLM_NO_PRIVATE_KERNELS", "01"[request.param == "public"])
    monkeypatch.setattr(cpu_kernels, "MIN_ONEDNN_ENTRIES", 0)
    monkeypatch.setattr("models.inference.inference_model.onednn_pays_off", lambda: request.param == "private")


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("packed", [False, True])
def test_it_generates_what_the_model_generates(tiny_model, changes, packed):
    model, plain = tiny_model(**changes), tiny_model(**changes)
    if packed:
        model.decoder.pack_projections()
    inference = InferenceModel(model, compile=False)
    assert_same(inference, plain)
    for use_kv_cache in (True, False):
        arguments = {"max_new_tokens": 40, "use_kv_cache": use_kv_cache}
        assert torch.equal(inference.generate(IDS, IMAGES, **arguments), plain.generate(IDS, IMAGES, **arguments))


def test_batches_padding_and_samples_match(tiny_model):
    inference, plain = InferenceModel(tiny_model(), compile=False), tiny_model()
    for inputs in (prompt("titt", "tt"), only_row(prompt("titt", "tt"), 1), prompt("tt", "titt", "i")):
        for n_samples in (1, 2):
            both = [m.generate(**inputs, max_new_tokens=8, n_samples=n_samples) for m in (inference, plain)]
            assert torch.equal(*both)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_match(tiny_model, dtype):
    model = tiny_model().to(dtype)
    assert_same(InferenceModel(model, compile=False), copy.deepcopy(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_close_to_the_dequantized_model(tiny_model, dtype):
    model = tiny_model(lm_tie_weights=False).to(dtype)
    inference = InferenceModel(model, quantize="int8-weights", compile=False)
    dequantized = copy.deepcopy(model)
    with torch.no_grad():
        for module in dequantized.decoder.modules():
            if isinstance(module, nn.Linear):
                scale = module.weight.float().abs().amax(1, keepdim=True) / 127
                scale = scale.to(dtype).float()
                module.weight.copy_((module.weight.float() / scale).round().clamp(-127, 127) * scale)
    assert_same(inference, dequantized, 1e-3 if dtype == torch.float32 else 0.06)


def test_the_model_is_never_changed(tiny_model):
    model = tiny_model().bfloat16()
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    places = {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters(remove_duplicate=False)}
    for quantize in (None, "int8", "int4"):
        InferenceModel(model, quantize=quantize, compile=False).generate(IDS, IMAGES.bfloat16(), max_new_tokens=5)
    after = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    assert {name: (kind, values.keys()) for name, (kind, values) in before.items()} == {
        name: (kind, values.keys()) for name, (kind, values) in after.items()
    }
    assert places == {
        name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters(remove_duplicate=False)
    }
    _, loss = model(IDS, IMAGES.bfloat16(), targets=IDS)
    loss.backward()  # and it can still be trained
    assert all(p.grad is not None for p in model.parameters())


def test_floating_point_weights_are_not_copied(tiny_model):
    model = tiny_model().bfloat16()
    model.decoder.pack_projections()
    inference = InferenceModel(model, compile=False)
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in inference.parameters()} <= mine


def test_a_prefix_is_continued_twice_and_by_both_in_turn(tiny_model):
    model = tiny_model()
    inference = InferenceModel(model, compile=False)
    with torch.inference_mode():
        _, prefix = inference.prefill(IDS, IMAGES)
        once, first = inference.decode(torch.tensor([8]), prefix)
        inference.decode(torch.tensor([11]), first)
        other, _ = inference.decode(torch.tensor([9]), prefix)
        _, plain = model.decode(torch.tensor([8]), prefix)
        for begun in (first, plain):
            torch.testing.assert_close(
                inference.decode(torch.tensor([12]), begun)[0], model.decode(torch.tensor([12]), begun)[0], **CLOSE
            )
        torch.testing.assert_close(once, inference.decode(torch.tensor([8]), prefix)[0], **CLOSE)
        assert not torch.allclose(once, other)


def test_no_step_beyond_the_models_positions(tiny_model):
    inference = InferenceModel(tiny_model(), compile=False)
    _, prefix = inference.prefill(torch.randint(4, 40, (1, 63)))
    _, prefix = inference.decode(torch.tensor([8]), prefix)
    with pytest.raises(InputError, match="65 tokens exceed lm_max_position_embeddings=64"):
        inference.decode(torch.tensor([8]), prefix)


def test_it_needs_no_inference_mode_and_keeps_no_graph(tiny_model):
    inference = InferenceModel(tiny_model(), compile=False)
    logits, prefix = inference.prefill(IDS, IMAGES)
    logits, _ = inference.decode(torch.tensor([8]), prefix)
    assert not logits.requires_grad
    torch.testing.assert_close(logits, logits_of(tiny_model())[1:2], **CLOSE)


def test_unknown_quantization_is_refused(tiny_model):
    with pytest.raises(InputError, match="quantize='int3' is not supported"):
        InferenceModel(tiny_model(), quantize="int3")


def test_int4_is_close_to_the_dequantized_model(wide_model):
    model = wide_model()
    inference = InferenceModel(model, quantize="int4", compile=False)
    dequantized = copy.deepcopy(model)
    layers = dict(inference.network.decoder.named_modules())
    with torch.no_grad():
        for name, module in dequantized.decoder.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(layers[name].dequantize(torch.float32).t())
    assert_same(inference, dequantized, 0.05)  # decoding rounds activations to bfloat16
    assert (logits_of(inference) - logits_of(model)).std() > 1e-3 * logits_of(model).std()


@torch.inference_mode()
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_prefill_gives_the_last_logits_of_the_whole_pass(wide_model, quantize):
    (model := wide_model()).decoder.pack_projections()
    inference = InferenceModel(model, quantize=quantize, compile=False)
    network, inputs = inference.network, prompt("titt", "tt")
    hidden, kv_cache = network.decoder(network.embed(inputs["input_ids"], inputs["images"]), inputs["attention_mask"])
    logits, prefix = inference.prefill(**inputs)
    wanted = network.decoder.head(hidden[:, -1])
    tolerance = 0.03 if quantize == "int4" else 1e-4  # the fewer rows take another kernel
    torch.testing.assert_close(logits, wanted, rtol=tolerance, atol=tolerance * max(1, wanted.abs().max().item()))
    for one, other in zip(prefix.kv_cache, kv_cache):
        assert torch.equal(one.key, other.key) and torch.equal(one.value, other.value)


def test_int4_decodes_with_one_product_for_adjacent_layers(wide_model):
    inference = InferenceModel(wide_model(), quantize="int4", compile=False)
    decoder = inference.network.decoder
    assert all(isinstance(block.attn.k_proj, Int4Linear) for block in decoder.blocks)
    if kernel_layout() is not None:
        assert int4_gemv([getattr(decoder.blocks[0].attn, f"{name}_proj") for name in "qkv"]) is not None
        assert int4_gemv([decoder.blocks[0].mlp.gate_proj, decoder.blocks[0].mlp.up_proj]) is not None
    assert decoder.token_embedding.weight.dtype == torch.float32
    ids, prefix = torch.tensor([8]), inference.prefill(IDS, IMAGES)[1]
    wanted = decoder.head(decoder(decoder.token_embedding(ids[:, None]), None, prefix.kv_cache, prefix.length)[0][:, 0])
    torch.testing.assert_close(
        inference.decode(ids, prefix)[0], wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item()
    )


def test_int4_is_not_compiled(tiny_model):
    with pytest.raises(InputError, match="does not read int4 weights; leave compile away, or use int8"):
        InferenceModel(tiny_model(), quantize="int4", compile=True)
    InferenceModel(tiny_model(), quantize="int4")  # looks for a compiled step, and finds none


# -------------------------------------------------------------------------------------- following the live weights


def load_adapters(model, folder):
    adapt(other := copy.deepcopy(model), 2, 4)
    torch.manual_seed(3)
    for module in adapters(other).values():
        nn.init.normal_(module.lora_B.weight)
    folder.mkdir()
    write_adapters(folder, other)
    read_adapters(folder, model)


def load_in_place(model, folder):
    model.load_state_dict({name: tensor.flip(0) for name, tensor in model.state_dict().items()})


def load_with_assign(model, folder):
    model.load_state_dict({name: tensor.flip(0) for name, tensor in model.state_dict().items()}, assign=True)
    model.decoder.tie_weights()


@torch.no_grad()
def edit_attention(model, folder):
    model.decoder.blocks[1].attn.k_proj.weight.mul_(-1.5)


@torch.no_grad()
def edit_vision(model, folder):
    model.vision_encoder.blocks[0].mlp.fc1.weight.mul_(-1.5)


@torch.no_grad()
def edit_norm(model, folder):
    model.decoder.norm.weight.mul_(-1.5)


def replace_parameter(model, folder):
    attn = model.decoder.blocks[0].attn
    attn.v_proj.weight = nn.Parameter(attn.v_proj.weight.detach() * -1.5)


def replace_module(model, folder):
    model.decoder.blocks[0].mlp.up_proj = nn.Linear(24, 32, bias=False).to(model.dtype)


def train_a_step(model, folder):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(IDS, IMAGES.to(model.dtype), targets=IDS)[1].backward()
    optimizer.step()


CHANGES = [
    load_adapters, load_in_place, load_with_assign, edit_attention, edit_vision, edit_norm, replace_parameter,
    replace_module, train_a_step, lambda m, _: m.bfloat16(), lambda m, _: m.double(), lambda m, _: m.bfloat16().float(),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("packed", [False, True])
def test_results_follow_the_weights(tiny_model, tmp_path, change, quantize, packed):
    model = tiny_model()
    if packed:
        model.decoder.pack_projections()
    inference = InferenceModel(model, quantize=quantize, compile=False)
    before = logits_of(inference)
    change(model, tmp_path / "adapters")
    fresh = InferenceModel(copy.deepcopy(model), quantize=quantize, compile=False)
    assert torch.equal(logits_of(inference), logits_of(fresh))
    if quantize is None:
        assert_same(inference, copy.deepcopy(model))
    if model.dtype != torch.float64 and change is not CHANGES[-1]:  # which only round
        assert not torch.allclose(logits_of(inference), before, atol=1e-3)


@pytest.mark.parametrize("change", [edit_attention, load_with_assign, replace_module, load_adapters])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_change_between_two_tokens_is_followed(tiny_model, tmp_path, change, quantize):
    model = tiny_model()
    inference = InferenceModel(model, quantize=quantize, compile=False)
    with torch.inference_mode():
        _, prefix = inference.prefill(IDS, IMAGES)
    with torch.inference_mode(False):
        change(model, tmp_path / "adapters")
    wanted, _ = InferenceModel(model, quantize=quantize, compile=False).decode(torch.tensor([8]), prefix)
    torch.testing.assert_close(inference.decode(torch.tensor([8]), prefix)[0], wanted)


def test_a_prefix_of_another_precision_is_refused(tiny_model):
    inference = InferenceModel(model := tiny_model(), compile=False)
    _, prefix = inference.prefill(IDS, IMAGES)
    model.bfloat16()
    with pytest.raises(NanoVLMError, match=r"computed in torch.float32 .* now in torch.bfloat16 .* prefill .* again"):
        inference.decode(torch.tensor([8]), prefix)


def test_edits_through_data_need_refresh_only_when_quantized(tiny_model):
    model = tiny_model()
    exact, quantized = (InferenceModel(model, quantize=q, compile=False) for q in (None, "int8"))
    model.decoder.blocks[0].mlp.up_proj.weight.data.mul_(-2)
    assert_same(exact, model)
    quantized.refresh()
    assert torch.equal(logits_of(quantized), logits_of(InferenceModel(model, quantize="int8", compile=False)))


def test_a_rebuild_is_logged_once(tiny_model, caplog):
    inference = InferenceModel(model := tiny_model(), compile=False)
    with caplog.at_level(logging.INFO, "models"):
        logits_of(inference)
        assert not caplog.records
        model.bfloat16()
        logits_of(inference), logits_of(inference)
    assert [record.message for record in caplog.records] == [
        "the model's weights have changed; rebuilding the inference model"
    ]


def test_a_merged_model_generates_what_its_adapters_do(tiny_model, tmp_path):
    model = tiny_model()
    inference = InferenceModel(model, compile=False)
    load_adapters(model, tmp_path / "adapters")
    assert_same(inference, model)
    assert_same(InferenceModel(merge(model), compile=False), model)


# --------------------------------------------------------------------------------------- copies, pickles and release


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("packed", [False, True])
def test_copies_are_independent(tiny_model, duplicate, quantize, packed):
    model = tiny_model()
    if packed:
        model.decoder.pack_projections()
    inference = InferenceModel(model, quantize=quantize, compile=False)
    wanted = logits_of(inference)
    twin, model_twin = duplicate(inference), duplicate(model)
    assert isinstance(twin.model, VisionLanguageModel) and twin.model is not model
    edit_attention(model, None)
    assert torch.equal(logits_of(twin), wanted)
    assert torch.equal(logits_of(InferenceModel(model_twin, quantize=quantize, compile=False)), wanted)
    edit_attention(twin.model, None)
    assert torch.equal(logits_of(twin), logits_of(inference))


@pytest.mark.parametrize(
    "duplicate", [lambda thing: thing, copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))]
)
def test_a_released_model_goes_on_without_its_source(tiny_model, duplicate):
    inference = InferenceModel(tiny_model(), quantize="int8", compile=False)
    wanted = logits_of(inference)
    inference.release_source()
    inference = duplicate(inference)
    assert torch.equal(logits_of(inference), wanted) and inference.dtype == torch.float32
    with pytest.raises(InputError, match="released after quantization; load the model without quantize="):
        _ = inference.model
    inference.refresh()
    assert torch.equal(logits_of(inference), wanted)


def test_release_frees_the_floating_point_weights(tiny_model):
    import weakref

    model = tiny_model(lm_tie_weights=False)
    head, embedding = weakref.ref(model.decoder.head.weight), weakref.ref(model.decoder.token_embedding.weight)
    inference = InferenceModel(model, quantize="int8", compile=False)
    inference.release_source()
    del model
    assert head() is None and embedding() is not None


def test_only_a_quantized_model_can_release_its_source(tiny_model):
    inference = InferenceModel(model := tiny_model(), compile=False)
    with pytest.raises(InputError, match="release_source needs quantize="):
        inference.release_source()
    assert inference.model is model
