"""Adapters beside shared weights compute what they compute merged, quantized or not, alone and in one batch."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from models.errors import CheckpointError, InputError
from models.inference.adapters import with_adapter
from models.inference.continuous_batching import ContinuousBatch
from models.inference.inference_model import InferenceModel
from models.inference.quantization import QuantizedLinear
from models.inference.serving_caches import ImageCache, PrefixCache, TiledImage
from models.lora import ADAPTER_WEIGHTS, merge, write_adapters
from support.generation import logits_of, only_row, prompt, run, run_ids

TRAINED = {
    "all parts": {},
    "decoder": {"parts": ("decoder",)},
    "embeddings": {"parts": ("decoder",), "embeddings": True, "rank": 12},
    "own head": {"embeddings": True, "lm_tie_weights": False},
}


@pytest.fixture
def make_adapter(adapted, tmp_path):
    """Write the adapters of a model that was trained so; their folder, and the model that has them merged."""

    def make(name="adapter", **trained):
        model = adapted(**trained)
        (tmp_path / name).mkdir()
        write_adapters(tmp_path / name, model)
        return tmp_path / name, merge(model)

    return make


def error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


def base_changes(trained):
    return {name: value for name, value in trained.items() if name.startswith("lm_")}


@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
def test_adapters_beside_the_weights_equal_merged_ones(level, tiny_model, make_adapter, trained):
    folder, merged = make_adapter(**trained)
    base = InferenceModel(tiny_model(**base_changes(trained)))
    before = logits_of(base)
    beside = with_adapter(base, folder)
    assert type(beside.network) is type(base.network)
    assert error(logits_of(beside), logits_of(merged)) < 1e-5
    assert torch.equal(logits_of(base), before) and error(before, logits_of(merged)) > 0.01


def test_adapters_of_some_layers_alone(level, tiny_model, make_adapter):
    folder, merged = make_adapter()
    state = load_file(folder / ADAPTER_WEIGHTS)
    kept = {name: x for name, x in state.items() if ".q_proj." in name or ".fc1." in name}
    save_file(kept, folder / ADAPTER_WEIGHTS)
    wanted = tiny_model()
    changed = [name for name, _ in wanted.named_parameters() if name.endswith(("q_proj.weight", "fc1.weight"))]
    assert len(changed) == 4
    wanted.load_state_dict({name: merged.state_dict()[name] for name in changed}, strict=False)
    assert error(logits_of(with_adapter(InferenceModel(tiny_model()), folder)), logits_of(wanted)) < 1e-5


def test_bfloat16_weights(level, tiny_model, make_adapter):
    folder, merged = make_adapter()
    beside = with_adapter(InferenceModel(tiny_model().bfloat16()), folder)
    assert error(logits_of(beside), logits_of(merged)) < 0.03  # 256 steps of 2, in some 20 products


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("trained", [{"parts": ("decoder",)}, TRAINED["own head"]], ids=["decoder", "own head"])
def test_a_quantized_base(level, tiny_model, make_adapter, format, trained):
    folder, merged = make_adapter(**trained)
    base = InferenceModel(tiny_model(**base_changes(trained)), quantize=format)
    quantized = dict(base.network.model.named_modules())
    base.release_source()
    beside = with_adapter(base, folder)
    trained_fully = ("decoder.head",) if trained.get("embeddings") else ()
    plain, original = merged, tiny_model(**base_changes(trained))
    for name, layer in quantized.items():  # the merged model, with the quantization's errors
        if isinstance(layer, QuantizedLinear) and name not in trained_fully:
            change = plain.get_submodule(name).weight - original.get_submodule(name).weight
            plain.get_submodule(name).weight = nn.Parameter((layer.dequantize(torch.float32) + change).detach())
    for name in trained_fully:
        layer = plain.get_submodule(name)
        layer.weight = nn.Parameter(QuantizedLinear(layer.weight, None, format).dequantize(torch.float32))
    assert error(logits_of(beside), logits_of(plain)) < (1e-5 if level == "none" else 0.05)  # which round activations


def test_a_quantized_base_without_adapters_beside_its_weights_is_no_model_to_save(tiny_model, make_adapter):
    folder, _ = make_adapter(embeddings=True)
    in_full = {name: x for name, x in load_file(folder / ADAPTER_WEIGHTS).items() if ".lora_" not in name}
    save_file(in_full, folder / ADAPTER_WEIGHTS)
    beside = with_adapter(InferenceModel(tiny_model(), quantize="int8"), folder)
    with pytest.raises(InputError, match="quantized weights; merge the adapters"):
        _ = beside.model


def test_the_base_is_shared_and_not_copied(tiny_model, make_adapter):
    folder, _ = make_adapter(embeddings=True)
    base = InferenceModel(tiny_model())
    shared = {p.data_ptr() for p in base.parameters()}
    named = with_adapter(base, folder).network.model.named_parameters(remove_duplicate=False)
    own = {name for name, p in named if p.data_ptr() not in shared}
    assert {name for name in own if ".lora_" not in name} == {"decoder.head.weight", "decoder.token_embedding.weight"}
    assert any(".lora_" in name for name in own)


def test_one_batch_holds_requests_for_the_base_and_for_several_adapters(level, tiny_model, make_adapter):
    folder, first = make_adapter(rank=2)
    other, second = make_adapter("other", rank=5, parts=("decoder",))
    base = InferenceModel(tiny_model())
    models = [base, with_adapter(base, folder), with_adapter(base, other)]
    plain = [tiny_model(), first, second]
    rows = prompt("itt", "ttt", "tit", "itt", "t", "iit", "itt", "ttt", "itt")
    batch = ContinuousBatch(base, max_num_seqs=4, image_cache=ImageCache(2**20), prefix_cache=PrefixCache(2**20))
    wanted = {}
    for i in range(9):
        row = only_row(rows, i)
        images = [
            TiledImage(image[None], (i, n)) for n, image in enumerate(() if row["images"] is None else row["images"])
        ]
        batch.add(i, row["input_ids"][0], images, max_new_tokens=6, model=models[i % 3])
        wanted[i] = plain[i % 3].generate(**row, max_new_tokens=6)[0].tolist()
    assert run_ids(batch) == wanted


def test_a_prefix_of_another_model_is_not_used(tiny_model, make_adapter):
    folder, merged = make_adapter(parts=("decoder",))
    base = InferenceModel(tiny_model())
    beside, ids = with_adapter(base, folder), torch.randint(4, 40, (40,), generator=torch.Generator().manual_seed(2))
    batch = ContinuousBatch(base, prefix_cache=PrefixCache(2**20))
    for model, plain, cached in ((base, tiny_model(), 0), (beside, merged, 0), (beside, merged, 39)):
        batch.add("key", ids, max_new_tokens=5, model=model)
        outputs = run(batch)["key"]
        assert [output.token_id for output in outputs] == plain.generate(ids[None], max_new_tokens=5)[0].tolist()
        assert outputs[0].n_cached == cached


def test_files_that_do_not_fit_are_named(tiny_model, make_adapter):
    folder, _ = make_adapter()
    with pytest.raises(CheckpointError, match="has not rank 3 and this layer's sizes"):
        with_adapter(InferenceModel(tiny_model(lm_inter_dim=40)), folder)
    with pytest.raises(CheckpointError, match="adapter_config.json"):
        with_adapter(InferenceModel(tiny_model()), folder / "nowhere")
