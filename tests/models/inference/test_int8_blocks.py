"""The network with int8 activations is close to its int8 weights' own, and a sequence is the same in any batch."""

import copy

import pytest
import torch
from torch import nn

from models.inference.cpu_kernels import has_int8_activations
from models.inference.inference_model import InferenceModel
from models.inference.int8_activations import Int8Matmul
from models.inference.int8_blocks import Int8Block, Int8ModalityProjector, Int8VisionTransformer
from models.language_model import Block
from models.lora import adapt, adapters, merge
from models.vision_transformer import VisionTransformer

LARGER = {"vit_img_size": 32, "mp_image_token_length": 16, "lm_max_position_embeddings": 256}  # 64 patches an image
IDS, IMAGES = torch.tensor([[5, *[3] * 16, 7, 9, 4]]), torch.rand(1, 3, 32, 32)

needs_kernel = pytest.mark.skipif(not has_int8_activations(), reason="this CPU or torch has no int8 products")


def relative_error(got, wanted):
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def int8_model(model, **options):
    return InferenceModel(model, quantize="int8", compile=False, **options)


def round_weights(model):
    """The model with the weights that int8 stands for."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                scale = module.weight.float().abs().amax(1, keepdim=True) / 127
                module.weight.copy_((module.weight / scale).round() * scale)
    return model


@needs_kernel
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_stage_is_close_to_the_model_with_rounded_weights(tiny_model, dtype):
    model = tiny_model(**LARGER, lm_tie_weights=False)
    wanted, quantized = round_weights(model), int8_model(model.to(dtype))
    network = quantized.network
    assert type(network.vision_encoder) is Int8VisionTransformer and type(network.MP) is Int8ModalityProjector
    assert {type(block) for block in network.decoder.blocks} == {Int8Block}
    assert (quantized.dtype, quantized.device.type) == (dtype, "cpu")
    patches = wanted.vision_encoder(IMAGES)
    got = network.vision_encoder(IMAGES.to(dtype))
    assert got.dtype == dtype and 1e-4 < relative_error(got, patches) < 0.03
    assert 1e-4 < relative_error(network.MP(patches.to(dtype)), wanted.MP(patches)) < 0.02
    logits, state = quantized.prefill(IDS, IMAGES)
    exact, exact_state = wanted.prefill(IDS, IMAGES)
    assert 1e-4 < relative_error(logits, exact) < 0.05 and state.kv_cache[0].key.dtype == dtype
    more = torch.tensor([[8, 6]])  # after a prefix
    assert (
        relative_error(quantized.prefill(more, None, None, state)[0], wanted.prefill(more, None, None, exact_state)[0])
        < 0.05
    )


@needs_kernel
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_does_not_depend_on_its_batch(tiny_model, dtype):
    model = int8_model(tiny_model(**LARGER).to(dtype))
    images = torch.cat([IMAGES, 100 * torch.rand(2, 3, 32, 32)])
    together = model.encode_images(images)
    assert torch.equal(together[:1], model.encode_images(IMAGES))
    ids = torch.tensor([[0, 0, 0, 5, 6, 8], [4, 9, 8, 7, 6, 5]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.1}
    logits, state = model.prefill(ids, attention_mask=mask)
    for row, length in ((0, 3), (1, 6)):
        alone, own = model.prefill(ids[row : row + 1, -length:])
        torch.testing.assert_close(logits[row : row + 1], alone, **tolerance)
        next_alone = model.decode(torch.tensor([7]), own)[0]
        torch.testing.assert_close(model.decode(torch.tensor([7, 7]), state)[0][row : row + 1], next_alone, **tolerance)


@needs_kernel
@torch.inference_mode()
def test_one_token_is_decoded_with_int8_weights_alone(tiny_model):
    model = tiny_model(**LARGER).bfloat16()
    full, weights = int8_model(model), InferenceModel(model, quantize="int8-weights", compile=False)
    _, prefix = weights.prefill(IDS, IMAGES)
    for n in (1, 3):
        state = prefix if n == 1 else weights.prefill(IDS.repeat(n, 1), IMAGES.repeat(n, 1, 1, 1))[1]
        ids = torch.full((n,), 8)
        assert torch.equal(full.decode(ids, state)[0], weights.decode(ids, state)[0])


@needs_kernel
def test_adapters_are_merged_first(tiny_model):
    adapt(model := tiny_model(**LARGER), 2, 4, ("decoder", "vision_encoder", "MP"))
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_B.weight.normal_()
    assert torch.equal(int8_model(model).prefill(IDS, IMAGES)[0], int8_model(merge(model)).prefill(IDS, IMAGES)[0])


@needs_kernel
def test_replaced_weights_are_released(tiny_model):
    network = int8_model(tiny_model(**LARGER).bfloat16()).network
    floating = [p for name, p in network.named_parameters() if p.is_floating_point() and p.dim() == 2]
    assert [p.shape for p in floating] == [network.decoder.token_embedding.weight.shape]
    assert isinstance(network.vision_encoder.blocks[0].fc1, Int8Matmul)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_without_the_kernel_only_the_language_models_weights_are_int8(tiny_model, monkeypatch, caplog, dtype):
    if dtype == torch.float32:
        monkeypatch.setenv("NANOVLM_NO_PRIVATE_KERNELS", "1")
    model = tiny_model(**LARGER).to(dtype)
    with caplog.at_level("INFO", "models"):
        network = int8_model(model).network
    assert f"no kernel for int8 activations in {dtype} on this device: the weights alone are int8" in caplog.messages
    assert type(network.vision_encoder.encoder) is VisionTransformer
    assert {type(block) for block in network.decoder.blocks} == {Block}
    weights = InferenceModel(model, quantize="int8-weights", compile=False)
    with torch.inference_mode():
        images = IMAGES.to(dtype)
        assert torch.equal(network.prefill(IDS, images)[0], weights.prefill(IDS, images)[0])
