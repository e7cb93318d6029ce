"""The vision encoder and the projector on CPUs: fewer, larger operations, and few patches at a time.

oneDNN adds bias and residual, or applies GELU, while it writes a product; torch alone writes it, reads it again and
writes it again. `python -m eval.latency` measures the effect.
"""

from typing import cast

import torch
from torch import Tensor, nn

from models.inference.cpu_kernels import (
    OneDNNLinear,
    fast_linear,
    has_onednn_linear,
    onednn_linear,
    onednn_linear_add,
    onednn_pays_off,
)
from models.inference.eager_ops import EagerOps
from models.modality_projector import ModalityProjector, pixel_shuffle
from models.vision_transformer import Block, PatchEmbedding, VisionTransformer

DTYPES = (torch.float32, torch.bfloat16)
MIN_FUSED_PATCHES = 16  # fewer gain nothing
MAX_TWO_THREAD_ROWS = 512  # of a product; oneDNN gives 1,024 rows of 768 columns to one of two threads
MAX_CHUNK_PATCHES = 1024  # of one pass through the encoder; tensors of more patches leave the processor's cache


class FusedBlock(nn.Module):
    """A block of the encoder whose products add bias and residual, or apply GELU, while they write.

    It shares the block's modules.
    """

    def __init__(self, block: Block, ops: EagerOps):
        super().__init__()
        self.block, self.ops = block, ops

    def forward(self, x: Tensor) -> Tensor:
        """x (N, T, C) to (N, T, C)."""
        block = self.block
        if x.numel() < MIN_FUSED_PATCHES * x.size(-1):
            return block(x)
        N, T, _ = x.shape
        qkv, out, fc1, fc2 = linears(block)
        q, k, v = (
            fast_linear(self.ops.layer_norm(x, block.ln1), qkv.weight, qkv.bias)
            .view(N, T, 3, block.attn.n_heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        x = _linear_add(self.ops.attention(q, k, v), out, x)
        hidden = self.ops.linear_gelu(self.ops.layer_norm(x, block.ln2), fc1)
        return _linear_add(hidden, fc2, x)


def linears(block: Block) -> tuple[nn.Linear, ...]:
    """The four products of a block, in their order."""
    return block.attn.qkv_proj, block.attn.out_proj, block.mlp.fc1, block.mlp.fc2


def _linear_add(x: Tensor, linear: nn.Linear, residual: Tensor) -> Tensor:
    """residual + linear(x), of the residual's shape, in one pass over the result."""
    rows, residual_rows = x.flatten(0, -2), residual.flatten(0, -2)
    if linear.weight.dtype != torch.bfloat16 and not onednn_pays_off():
        result = residual_rows + linear.bias
        return result.addmm_(rows, linear.weight.t()).view_as(residual)
    n = MAX_TWO_THREAD_ROWS if torch.get_num_threads() == 2 else max(1, len(rows))
    parts = zip(rows.split(n), residual_rows.split(n))
    sums = [onednn_linear_add(part, linear.weight, linear.bias, other) for part, other in parts]
    return (sums[0] if len(sums) == 1 else torch.cat(sums)).view_as(residual)


class FusedPatchEmbedding(nn.Module):
    """The patch embedding as one product, without a convolution's change of layout; it shares the parameters."""

    def __init__(self, embedding: PatchEmbedding):
        super().__init__()
        self.conv, self.position_embedding = embedding.conv, embedding.position_embedding
        self.position_ids = embedding.position_ids

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, 3, S, S) to patches (N, P, C), row by row."""
        weight, (N, channels, S, _), side = self.conv.weight, images.shape, self.conv.kernel_size[0]
        grid = S // side
        images = images[..., : grid * side, : grid * side]  # as a convolution, without pixels that fill no patch
        pixels = images.reshape(N, channels, grid, side, grid, side).permute(0, 2, 4, 1, 3, 5)
        patches = fast_linear(pixels.reshape(N, -1, weight[0].numel()), weight.flatten(1), self.conv.bias)
        positions = self.position_embedding
        return patches.add_(positions if self.position_ids is None else positions[:, self.position_ids])


class FusedProjector(nn.Module):
    """The projector with its weight as the product's left factor, as in `models.inference.fused_prefill`."""

    def __init__(self, projector: ModalityProjector):
        super().__init__()
        self.factor, self.proj = projector.factor, projector.proj

    def forward(self, x: Tensor) -> Tensor:
        """The arguments and results of `ModalityProjector.forward`."""
        x = pixel_shuffle(x, self.factor)
        return onednn_linear(self.proj.weight, x.flatten(0, 1), None).t().contiguous().view(*x.shape[:-1], -1)


class ChunkedVisionTransformer(nn.Module):
    """A vision encoder that is given at most MAX_CHUNK_PATCHES patches at once."""

    def __init__(self, encoder: VisionTransformer):
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        n_patches = self.encoder.patch_embedding.position_embedding.size(1)
        chunks = images.split(max(1, MAX_CHUNK_PATCHES // n_patches))
        return torch.cat([self.encoder(chunk) for chunk in chunks]) if len(chunks) > 1 else self.encoder(images)


def fuse_vision(encoder: VisionTransformer, ops: EagerOps) -> ChunkedVisionTransformer:
    """The encoder with fused modules, which replace its own, in chunks; for CPUs and for inference only."""
    embedding = encoder.patch_embedding
    if type(embedding) is PatchEmbedding and type(embedding.conv) is nn.Conv2d and has_onednn_linear():
        encoder.patch_embedding = cast(PatchEmbedding, FusedPatchEmbedding(embedding))
    blocks = cast(nn.ModuleList, encoder.blocks)
    for i, block in enumerate(encoder.blocks):
        plain = type(block) is Block and all(type(linear) in (nn.Linear, OneDNNLinear) for linear in linears(block))
        if plain and block.mlp.fc1.weight.dtype in DTYPES and has_onednn_linear():
            blocks[i] = FusedBlock(block, ops)
    return ChunkedVisionTransformer(encoder)


def fuse_projector(projector: ModalityProjector) -> nn.Module:
    """The projector in fewer passes over its weight; for CPUs and for inference only."""
    plain = type(projector) is ModalityProjector and type(projector.proj) in (nn.Linear, OneDNNLinear)
    supported = plain and projector.proj.weight.dtype in DTYPES and has_onednn_linear()
    return FusedProjector(projector) if supported else projector
