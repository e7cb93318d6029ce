"""The fused vision encoder gives what the plain one gives, up to rounding."""

import pytest
import torch

from models.inference import fused_vision
from models.inference.cpu_kernels import has_onednn_linear
from models.inference.fused_vision import FusedBlock, fuse_vision
from models.inference.inference_model import InferenceModel
from models.inference.live_weights import share_modules
from models.vision_transformer import Block

LARGER = {"vit_img_size": 32, "mp_image_token_length": 16, "lm_max_position_embeddings": 256}  # 64 patches an image


def relative_error(got, wanted):
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


@torch.inference_mode()
@pytest.mark.parametrize("private_kernels", [True, False])
def test_fused_encoder_is_as_close_to_float32_as_the_plain_one(tiny_model, monkeypatch, private_kernels):
    if not private_kernels:
        monkeypatch.setenv("NANOVLM_NO_PRIVATE_KERNELS", "1")
    elif not has_onednn_linear():
        pytest.skip("this torch has no oneDNN linear")
    images = torch.rand(2, 3, 32, 32)
    wanted = tiny_model(**LARGER).vision_encoder(images)
    plain = tiny_model(**LARGER).bfloat16().vision_encoder
    fused = fuse_vision(share_modules(plain))
    assert all((type(block) is FusedBlock) == private_kernels for block in fused.encoder.blocks)
    assert all(type(block) is Block for block in plain.blocks), "the model itself is unchanged"
    error, plain_error = (relative_error(encoder(images.bfloat16()), wanted) for encoder in (fused, plain))
    assert error < max(2 * plain_error, 0.02)


@torch.inference_mode()
def test_few_patches_take_the_plain_block(tiny_model):
    block = tiny_model().bfloat16().vision_encoder.blocks[0]
    x = torch.randn(1, fused_vision.MIN_FUSED_PATCHES - 1, 16).bfloat16()
    assert torch.equal(FusedBlock(block)(x), block(x))


@torch.inference_mode()
def test_many_images_are_encoded_in_chunks(tiny_model, monkeypatch):
    model, sizes = tiny_model(**LARGER), []
    images = torch.rand(5, 3, 32, 32)
    whole = model.vision_encoder(images)
    monkeypatch.setattr(fused_vision, "MAX_CHUNK_PATCHES", 128)
    model.vision_encoder.patch_embedding.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    chunked = InferenceModel(model).network.vision_encoder(images)
    assert sizes == [2, 2, 1]
    torch.testing.assert_close(chunked, whole)
