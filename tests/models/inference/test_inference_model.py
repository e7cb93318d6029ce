"""The networks compute what the core does, never change the model, and follow its live weights."""

import copy
import logging
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from models.common.errors import InputError
from models.common.options import SamplingParams
from models.inference.caches import TiledImage
from models.inference.continuous_batching import ContinuousBatch, Request
from models.inference.inference_model import InferenceModel, PlainNetwork
from models.inference.kernel_network import KernelNetwork, empty_cache
from models.inference.kernels.load import WITHOUT_BF16_DOT
from models.inference.quantization import QuantizedLinear
from models.lora import adapt, adapters
from models.lora.files import read_adapters, write_adapters
from models.vision_language_model import VisionLanguageModel
from support.generation import IDS, IMAGES, logits_of, only_row, prompt, run

by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
pytestmark = pytest.mark.usefixtures("level")


def assert_same(inference, plain, tolerance=None):
    got, wanted = logits_of(inference), logits_of(plain)
    tolerance = tolerance or (1e-4 if plain.dtype == torch.float32 else 0.05)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_layer_may_have_another_format_than_those_beside_it(tiny_model, name, quantize):
    attn = (model := tiny_model()).decoder.blocks[0].attn
    setattr(attn, name, QuantizedLinear(getattr(attn, name).weight, None, quantize))
    assert_same(InferenceModel(model), model, 0.05)


@pytest.mark.parametrize("name", ["encode_images", "embed_tokens", "prefill_embeds"])
def test_a_subclass_is_computed_by_its_own_methods(tiny_model, name):
    def doubled(self, *args):
        result = getattr(VisionLanguageModel, name)(self, *args)
        return (2 * result[0], result[1]) if name == "prefill_embeds" else 2 * result

    other = tiny_model()
    model = type("Doubled", (VisionLanguageModel,), {name: doubled})(other.cfg, other.image_token_id).eval()
    model.load_state_dict(other.state_dict())
    assert_same(InferenceModel(model), model)
    assert not torch.allclose(logits_of(model), logits_of(other), atol=0.1)


@pytest.mark.parametrize("changes", [{}, {"lm_tie_weights": False}, {"lm_attn_scaling": 0.5}, {"lm_n_kv_heads": 6}])
def test_a_batch_generates_what_the_model_generates_alone(tiny_model, changes):
    model = tiny_model(lm_max_position_embeddings=128, **changes)
    assert_same(InferenceModel(model), model)
    rows = ["titt", "tt", "i", "t", f"i{'t' * 40}", f"i{'t' * 40}", "titt"]
    prompts = [only_row(prompt(row, seed=seed), 0) for seed, row in enumerate(rows[:4])]
    prompts += 2 * [only_row(prompt(rows[4]), 0)] + [prompts[0]]
    samplings = [*6 * [SamplingParams()], SamplingParams(temperature=1.0, repetition_penalty=1.2, seed=3)]
    shown = [None if one["images"] is None else TiledImage(one["images"]) for one in prompts]
    shown[5] = shown[4]
    requests = [
        Request(one["input_ids"][0].tolist(), [image] if image else [], sampling, 40)
        for one, image, sampling in zip(prompts, shown, samplings)
    ]
    found = run(ContinuousBatch(model, max_num_seqs=4), *requests)
    for ids, one, sampling in zip(found, prompts, samplings):
        assert ids == model.generate(**one, max_new_tokens=40, sampling=sampling)[0].tolist()
    assert requests[5].n_cached == len(requests[5].ids) - 1


@torch.inference_mode()
def test_a_token_is_the_same_on_more_threads_than_keys_have_heads(tiny_model, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    network = InferenceModel(tiny_model(lm_n_heads=6, lm_n_kv_heads=2, lm_hidden_dim=48)).network
    logits = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        cache = empty_cache(network, 1, 40)
        network.prefill([network.embed_tokens(torch.arange(4, 24))], cache, 0, [0])
        logits.append(network.decode_tokens(torch.tensor([[8]]), cache, [20], [0]))
    torch.testing.assert_close(*logits)


@torch.inference_mode()
@by_dtype
@pytest.mark.parametrize("heads", [{}, {"lm_n_heads": 5, "lm_n_kv_heads": 1, "lm_hidden_dim": 420}])  # of 4 and 84
def test_prompts_and_tokens_of_odd_lengths_behind_any_slot(tiny_model, heads, dtype, level):
    """Lengths around a panel, in slots in any order, against the same weights in float32, each prompt alone.

    Without bfloat16 arithmetic the kernels multiply bfloat16 weights exactly.
    """
    model = tiny_model(lm_max_position_embeddings=256, **heads).to(dtype)
    network, exact_model = InferenceModel(model).network, copy.deepcopy(model).float()
    exact = dtype == torch.float32 or level in WITHOUT_BF16_DOT
    generator = torch.Generator().manual_seed(0)
    for lengths in ((2,), (31, 32), (33, 33, 30), (70,), (16, 15, 14, 13, 2), (1, 1)):
        prompts = [torch.randint(4, 40, (n,), generator=generator) for n in lengths]
        slots = [*range(1, len(prompts) + 1)][::-1]
        cache = empty_cache(network, len(prompts) + 2, 120).fill_(7)  # what other requests have left there
        rows = [network.prefill([network.embed_tokens(ids) for ids in prompts], cache, 0, slots)]
        past = [*lengths]
        new = torch.randint(4, 40, (len(prompts), 2), generator=generator)
        for column in new.unbind(1):
            rows.append(network.decode_tokens(column[:, None], cache, past, slots))
            past = [n + 1 for n in past]
        alone = network.decode_tokens(torch.tensor([[8, 9, 10]]), cache, past[:1], slots[:1])
        for i, ids in enumerate(prompts):
            logits, state = exact_model.prefill(ids[None])
            wanted = [logits]
            for token in new[i]:
                logits, state = exact_model.decode(token[None], state)
                wanted.append(logits)
            got = torch.stack([row[i] for row in rows]).float()
            if i == 0:
                got = torch.cat([got, alone.float()])
                wanted.append(exact_model.prefill(torch.tensor([[8, 9, 10]]), prefix=state)[0])
            assert (got - torch.cat(wanted)).norm() < (1e-5 if exact else 0.05) * torch.cat(wanted).norm()
        if len(set(lengths)) == 1:  # behind a beginning that they have in common
            halves = [len(ids) // 2 for ids in prompts]
            x = [network.embed_tokens(ids) for ids in prompts]
            if start := halves[0]:
                network.prefill([row[:start] for row in x], cache, 0, slots)
                behind = network.prefill([row[start:] for row in x], cache, start, slots)
                assert (behind - rows[0]).norm() < (1e-5 if exact else 0.05) * rows[0].norm()


@by_dtype
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_logits_are_those_of_the_dequantized_model(tiny_model, dtype, quantize):
    heads = {"lm_n_heads": 4, "lm_n_kv_heads": 2}  # of 32 channels, and q, k and v, and gate and up, one product
    model = tiny_model(lm_hidden_dim=128, lm_inter_dim=192, lm_tie_weights=False, **heads).to(dtype)
    inference = InferenceModel(model, quantize=quantize)
    layers, dequantized = dict(inference.network.model.named_modules()), copy.deepcopy(model)
    with torch.no_grad():
        for name, module in dequantized.named_modules():
            if isinstance(layers[name], QuantizedLinear):
                module.weight.copy_(layers[name].dequantize(dtype))
    assert all(isinstance(layers[f"decoder.blocks.0.attn.{name}_proj"], QuantizedLinear) for name in "qkv")
    got, wanted = logits_of(inference), logits_of(dequantized)
    assert (got - wanted).norm() < 0.06 * wanted.norm()
    assert (got - logits_of(model)).norm() > 1e-3 * wanted.norm()


def test_the_model_is_never_changed_nor_its_floating_point_weights_copied(tiny_model, level):
    assert type(InferenceModel(tiny_model()).network) is (PlainNetwork if level == "none" else KernelNetwork)
    assert type(InferenceModel(tiny_model().half()).network) is PlainNetwork

    def fingerprint(model):
        modules = {name: (type(module), list(vars(module))) for name, module in model.named_modules()}
        named = model.named_parameters(remove_duplicate=False)
        return modules, {name: (id(p), p.data_ptr(), p._version) for name, p in named}

    before = fingerprint(model := tiny_model().bfloat16())
    for quantize in (None, "int8", "int4"):
        inference = InferenceModel(model, quantize=quantize)
        logits_of(inference)
        used = {p.data_ptr() for p in inference.parameters()}
        assert quantize or used <= {p.data_ptr() for p in model.parameters()}
    assert fingerprint(model) == before
    model(IDS, IMAGES.bfloat16(), targets=IDS)[1].backward()  # and it can still be trained
    assert all(p.grad is not None for p in model.parameters())


@torch.inference_mode()
def test_shapes_that_do_not_fit_are_refused(tiny_model):
    network = InferenceModel(tiny_model()).network
    width, cache = network.model.cfg.lm_hidden_dim, empty_cache(network, 2, 8)
    is_kernel = type(network) is KernelNetwork
    for x, memory, start, slots in is_kernel * (
        (torch.rand(3, width - 2), cache, 0, [0]),
        (torch.rand(0, width), cache, 0, [0]),
        (torch.rand(9, width), cache, 0, [0]),
        (torch.rand(3, width), cache, 6, [0]),
        (torch.rand(3, width), cache, 0, [2]),
        (torch.rand(3, width), cache[:1], 0, [0]),
        (torch.rand(3, width), cache[..., :2], 0, [0]),
        (torch.rand(3, width, device="meta"), cache, 0, [0]),
    ):
        with pytest.raises(InputError, match="do not fit a cache of|meta"):
            network.prefill([x], memory, start, slots)
    with pytest.raises((InputError, RuntimeError), match="meta"):
        network.encode_images(IMAGES.to("meta"))
    with pytest.raises((InputError, RuntimeError), match="vit_img_size=16|size"):
        network.encode_images(torch.rand(1, 3, 20, 20))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_and_device_change_nothing(tiny_model, dtype, request):
    request.addfinalizer(partial(torch.set_default_dtype, torch.float32))
    wanted = logits_of(inference := InferenceModel(tiny_model()))
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        other = InferenceModel(inference.model)
    assert torch.equal(logits_of(inference), wanted) and torch.equal(logits_of(other), wanted)


def load_adapters(model, folder):
    adapt(other := copy.deepcopy(model), 2, 4)
    torch.manual_seed(3)
    for module in adapters(other).values():
        nn.init.normal_(module.lora_B.weight)
    folder.mkdir()
    write_adapters(folder, other)
    read_adapters(folder, model)


def load(model, folder, assign=False):
    model.load_state_dict({name: tensor.flip(0) for name, tensor in model.state_dict().items()}, assign=assign)
    model.decoder.tie_weights()


@torch.no_grad()
def edit(name, model, folder):
    model.get_parameter(name).mul_(-1.5)


def replace_parameter(model, folder):
    attn = model.decoder.blocks[0].attn
    attn.v_proj.weight = nn.Parameter(attn.v_proj.weight.detach() * -1.5)


CHANGES = [
    load_adapters, load, partial(load, assign=True), replace_parameter,
    *(partial(edit, f"{name}.weight") for name in (
        "decoder.blocks.1.attn.k_proj", "vision_encoder.blocks.0.mlp.fc1", "decoder.norm",
    )),
    lambda m, _: setattr(m.decoder.blocks[0].mlp, "up_proj", nn.Linear(24, 32, bias=False).to(m.dtype)),
    lambda m, _: m.bfloat16(), lambda m, _: m.half(), lambda m, _: m.double(), lambda m, _: m.bfloat16().float(),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("quantize", [None, "int8", pytest.param("int4", marks=pytest.mark.full)])
def test_results_follow_the_weights(tiny_model, tmp_path, caplog, change, quantize):
    inference = InferenceModel(model := tiny_model(), quantize=quantize)
    only_rounds = change in CHANGES[-4:]
    with caplog.at_level(logging.INFO, "models"):
        before = logits_of(inference)
        batch = ContinuousBatch(inference)
        batch.add(running := Request([4, 5, 6], max_new_tokens=9))
        batch.step()
        assert not caplog.records
        change(model, tmp_path / "adapters")
        if not only_rounds:
            batch.step()  # a generation goes on
            assert len(running.output) == 2 and running.error is None
        got = logits_of(inference)
        logged = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert logged == ["the model has changed; rebuilding the inference model"]
    assert torch.equal(got, logits_of(InferenceModel(copy.deepcopy(model), quantize=quantize)))
    if quantize is None:
        assert_same(inference, copy.deepcopy(model))
    if not only_rounds:
        assert not torch.allclose(got, before, atol=1e-3)


def test_edits_through_data_need_refresh_only_when_quantized(tiny_model):
    exact, quantized = (InferenceModel(model, quantize=q) for model in [tiny_model()] for q in (None, "int8"))
    exact.model.decoder.blocks[0].mlp.up_proj.weight.data.mul_(-2)
    assert_same(exact, exact.model)
    quantized.refresh()
    assert torch.equal(logits_of(quantized), logits_of(InferenceModel(exact.model, quantize="int8")))


@torch.inference_mode()
@pytest.mark.parametrize(("size", "factor", "length"), [(16, 2, 4), (12, 3, 1)])
@by_dtype
def test_images_of_several_sizes_of_batch(tiny_model, size, factor, length, dtype):
    """With 16 or 9 patches, images share panels of tokens; 9 also leave half of a pair of bfloat16 values empty."""
    tokens = {"mp_pixel_shuffle_factor": factor, "mp_image_token_length": length}
    model = tiny_model(vit_img_size=size, max_img_size=2 * size, **tokens).to(dtype)
    inference, images = InferenceModel(model), torch.rand(5, 3, size, size, dtype=dtype)
    for n in (0, 1, 2, 5):
        got, wanted = inference.encode_images(images[:n]), model.encode_images(images[:n])
        assert got.shape == wanted.shape
        assert (got.float() - wanted.float()).norm() <= (1e-5 if dtype == torch.float32 else 0.05) * wanted.norm()


@torch.inference_mode()
@pytest.mark.parametrize("factor", [1, 300])
def test_attention_of_images_in_an_int8_model(tiny_model, factor, level):
    """It rounds to int16 at some levels, whether patches look at all others or, by a large factor, at a few.

    That differs by 0.1% from float32, which turns some of the int8 roundings behind it; these differ by 1.4 and 3%.
    """
    size = {"vit_img_size": 68, "vit_patch_size": 4, "vit_hidden_dim": 32, "vit_n_heads": 2, "max_img_size": 136}
    model = tiny_model(**size, mp_pixel_shuffle_factor=17, mp_image_token_length=1)
    model.vision_encoder.blocks[0].attn.qkv_proj.weight[:32] *= factor
    images = torch.rand(3, 3, 68, 68, generator=torch.Generator().manual_seed(1))
    got, wanted = InferenceModel(model, quantize="int8").encode_images(images), model.encode_images(images)
    assert (got - wanted).norm() < (0.02 if factor == 1 else 0.05) * wanted.norm()


def test_a_released_model_goes_on_without_its_source(tiny_model):
    inference = InferenceModel(model := tiny_model(lm_tie_weights=False))
    assert inference.model is model
    with pytest.raises(InputError, match="release_source needs quantize="):
        inference.release_source()
    with pytest.raises(InputError, match="quantize='int3' is not supported"):
        InferenceModel(model, quantize="int3")
    head, embedding = (weakref.ref(x.weight) for x in (model.decoder.head, model.decoder.token_embedding))
    inference = InferenceModel(model, quantize="int8")
    wanted = logits_of(inference)
    inference.release_source()
    del model
    for _ in range(2):
        assert torch.equal(logits_of(inference), wanted) and inference.dtype == torch.float32
        with pytest.raises(InputError, match="released after quantization; load the model without quantize="):
            _ = inference.model
        inference.refresh()
    assert head() is None and embedding() is not None
