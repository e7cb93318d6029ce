"""The vision encoder on CPUs: GELU fused into the product before it in bfloat16, and few patches at a time.

The hidden tensor of an MLP is the widest of the encoder. oneDNN applies GELU while it writes that tensor; torch alone
writes it, reads it again and writes it again. `python -m eval.latency` measures the effect.
"""

from typing import cast

import torch
from torch import Tensor, nn

from models.inference.cpu_kernels import OneDNNLinear, has_onednn_linear, onednn_linear_gelu
from models.vision_transformer import MLP, VisionTransformer

MIN_FUSED_PATCHES = 16  # fewer gain nothing
MAX_CHUNK_PATCHES = 1024  # of one pass through the encoder; tensors of more patches leave the processor's cache


class FusedMLP(nn.Module):
    """A vision MLP in bfloat16 whose first product and GELU are one operation. It shares the MLP's modules."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        fc1 = self.mlp.fc1
        if x.numel() < MIN_FUSED_PATCHES * x.size(-1):
            return self.mlp(x)
        return self.mlp.fc2(onednn_linear_gelu(x, fc1.weight, fc1.bias))


class ChunkedVisionTransformer(nn.Module):
    """A vision encoder that is given at most MAX_CHUNK_PATCHES patches at once."""

    def __init__(self, encoder: VisionTransformer):
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        n_patches = self.encoder.patch_embedding.position_embedding.size(1)
        chunks = images.split(max(1, MAX_CHUNK_PATCHES // n_patches))
        return torch.cat([self.encoder(chunk) for chunk in chunks])


def fuse_vision(encoder: VisionTransformer) -> ChunkedVisionTransformer:
    """The encoder with fused MLPs, which replace its own, in chunks; for CPUs and for inference only."""
    for block in encoder.blocks:
        mlp = block.mlp
        plain = type(mlp) is MLP and type(mlp.fc1) in (nn.Linear, OneDNNLinear)
        if plain and mlp.fc1.weight.dtype == torch.bfloat16 and has_onednn_linear():
            block.mlp = cast(MLP, FusedMLP(mlp))
    return ChunkedVisionTransformer(encoder)
