"""The fused vision encoder gives what the plain one gives, up to rounding."""

import pytest
import torch

from models.inference import cpu_kernels, fused_vision
from models.inference.cpu_kernels import has_onednn_linear
from models.inference.eager_ops import EagerOps
from models.inference.fused_vision import (
    FusedBlock,
    FusedPatchEmbedding,
    FusedProjector,
    fuse_projector,
    fuse_vision,
)
from models.inference.inference_model import InferenceModel
from models.inference.live_weights import share_modules
from models.vision_transformer import Block

LARGER = {"vit_img_size": 32, "mp_image_token_length": 16, "lm_max_position_embeddings": 256}  # 64 patches an image


def relative_error(got, wanted):
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("private_kernels", [True, False])
def test_fused_encoder_is_as_close_to_float32_as_the_plain_one(tiny_model, monkeypatch, private_kernels, dtype):
    if not private_kernels:
        monkeypatch.setenv("NANOVLM_NO_PRIVATE_KERNELS", "1")
    elif not has_onednn_linear():
        pytest.skip("this torch has no oneDNN linear")
    images = torch.rand(2, 3, 32, 32)
    wanted = tiny_model(**LARGER).vision_encoder(images)
    plain = tiny_model(**LARGER).to(dtype).vision_encoder
    fused = fuse_vision(share_modules(plain), EagerOps())
    assert all((type(block) is FusedBlock) == private_kernels for block in fused.encoder.blocks)
    assert all(type(block) is Block for block in plain.blocks), "the model itself is unchanged"
    error, plain_error = (relative_error(encoder(images.to(dtype)), wanted) for encoder in (fused, plain))
    assert error < max(2 * plain_error, 0.02 if dtype == torch.bfloat16 else 1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_float32_blocks_match_with_either_library(tiny_model, monkeypatch, onednn, n_threads):
    """On two threads the rows are split, unevenly here."""
    block = tiny_model().vision_encoder.blocks[0]
    x = torch.randn(2, 40, 16)
    wanted = block(x)
    for module in (fused_vision, cpu_kernels):
        monkeypatch.setattr(module, "onednn_pays_off", lambda: onednn)
    monkeypatch.setattr(fused_vision, "MAX_TWO_THREAD_ROWS", 32)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    got = FusedBlock(block, EagerOps())(x)
    torch.set_num_threads(before)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("position_ids", [None, [3, 0, 1, 2]])
def test_patch_embedding_is_the_convolution(tiny_model, position_ids):
    embedding = tiny_model(vit_img_size=8, mp_image_token_length=1).vision_encoder.patch_embedding
    embedding.position_ids = position_ids
    whole = torch.rand(2, 3, 8, 8)
    for images in (whole, whole.contiguous(memory_format=torch.channels_last), torch.rand(2, 3, 9, 9)):  # 9: a rest
        torch.testing.assert_close(FusedPatchEmbedding(embedding)(images), embedding(images), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.skipif(not has_onednn_linear(), reason="this torch has no oneDNN linear")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projector_matches_the_plain_one(tiny_model, dtype):
    model = tiny_model(**LARGER).to(dtype)
    x = torch.randn(3, 64, 16, dtype=dtype)
    fused, wanted = fuse_projector(model.MP), model.MP(x)
    assert type(fused) is FusedProjector and fused.proj is model.MP.proj
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(fused(x), wanted, **tolerance)


@torch.inference_mode()
def test_few_patches_take_the_plain_block(tiny_model):
    block = tiny_model().bfloat16().vision_encoder.blocks[0]
    x = torch.randn(1, fused_vision.MIN_FUSED_PATCHES - 1, 16).bfloat16()
    assert torch.equal(FusedBlock(block, EagerOps())(x), block(x))


@torch.inference_mode()
def test_many_images_are_encoded_in_chunks(tiny_model, monkeypatch):
    model, sizes = tiny_model(**LARGER), []
    images = torch.rand(5, 3, 32, 32)
    whole = model.vision_encoder(images)
    monkeypatch.setattr(fused_vision, "MAX_CHUNK_PATCHES", 128)
    model.vision_encoder.layer_norm.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    chunked = InferenceModel(model).network.vision_encoder(images)
    assert sizes == [2, 2, 1]
    torch.testing.assert_close(chunked, whole)
