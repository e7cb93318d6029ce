"""The vision encoder on CPUs: in bfloat16 with fewer, larger operations, and few patches at a time.

oneDNN adds bias and residual, or applies GELU, while it writes a product; torch alone writes it, reads it again and
writes it again. `python -m eval.latency` measures the effect.
"""

from typing import cast

import torch
from torch import Tensor, nn

from models.attention import attention
from models.inference.cpu_kernels import (
    OneDNNLinear,
    has_onednn_linear,
    onednn_linear,
    onednn_linear_add,
    onednn_linear_gelu,
)
from models.vision_transformer import Block, VisionTransformer

MIN_FUSED_PATCHES = 16  # fewer gain nothing
MAX_CHUNK_PATCHES = 1024  # of one pass through the encoder; tensors of more patches leave the processor's cache


class FusedBlock(nn.Module):
    """A block of the encoder in bfloat16 whose products add bias and residual, or apply GELU, while they write.

    It shares the block's modules.
    """

    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """x (N, T, C) to (N, T, C)."""
        block = self.block
        if x.numel() < MIN_FUSED_PATCHES * x.size(-1):
            return block(x)
        N, T, C = x.shape
        qkv, out, fc1, fc2 = linears(block)
        q, k, v = (
            onednn_linear(block.ln1(x), qkv.weight, qkv.bias)
            .view(N, T, 3, block.attn.n_heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        y = attention(q, k, v).transpose(1, 2).reshape(N, T, C)
        x = onednn_linear_add(y, out.weight, out.bias, x)
        hidden = onednn_linear_gelu(block.ln2(x), fc1.weight, fc1.bias)
        return onednn_linear_add(hidden, fc2.weight, fc2.bias, x)


def linears(block: Block) -> tuple[nn.Linear, ...]:
    """The four products of a block, in their order."""
    return block.attn.qkv_proj, block.attn.out_proj, block.mlp.fc1, block.mlp.fc2


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
    """The encoder with fused blocks, which replace its own, in chunks; for CPUs and for inference only."""
    blocks = cast(nn.ModuleList, encoder.blocks)
    for i, block in enumerate(encoder.blocks):
        plain = type(block) is Block and all(type(linear) in (nn.Linear, OneDNNLinear) for linear in linears(block))
        if plain and block.mlp.fc1.weight.dtype == torch.bfloat16 and has_onednn_linear():
            blocks[i] = FusedBlock(block)
    return ChunkedVisionTransformer(encoder)
