"""The network with int8 weights and int8 activations on CPUs: vision encoder, projector, and the decoder's prefill.

What multiplies many rows rounds them to int8; norms, attention, GELU and the residual stream stay in floating point.
One token at a time is decoded with int8 weights alone: that is memory-bandwidth bound, and more exact.
"""

import copy
import logging
from typing import cast

import torch
from torch import Tensor, nn

from models import language_model, vision_transformer
from models.cache import KVCache
from models.inference.cpu_kernels import has_int8_activations
from models.inference.eager_ops import EagerOps
from models.inference.int8_activations import Int8Matmul
from models.inference.quantization import Int8Linear, quantize_int8
from models.modality_projector import ModalityProjector, pixel_shuffle
from models.vision_language_model import VisionLanguageModel
from models.vision_transformer import VisionTransformer

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)  # that oneDNN writes int8 products in
MIN_GELU = -0.17  # below the function's minimum


def quantize_activations(network: VisionLanguageModel, ops: EagerOps) -> None:
    """Replace, in place, what has a form with int8 activations; the decoder's linear layers are int8 already.

    Without oneDNN's products, which need AVX512-VNNI, nothing happens and a log entry says so.
    """
    weight = network.decoder.norm.weight
    if weight.device.type != "cpu" or weight.dtype not in DTYPES or not has_int8_activations():
        logger.info("no kernel for int8 activations in %s on this device: the weights alone are int8", weight.dtype)
        return
    quantize_int8(network.vision_encoder)
    if type(network.vision_encoder) is VisionTransformer and all(map(_is_vision_block, network.vision_encoder.blocks)):
        network.vision_encoder = cast(VisionTransformer, Int8VisionTransformer(network.vision_encoder, ops))
    quantize_int8(network.MP)
    if type(network.MP) is ModalityProjector:
        network.MP = cast(ModalityProjector, Int8ModalityProjector(network.MP, weight.dtype, ops))
    blocks, head = cast(nn.ModuleList, network.decoder.blocks), cast(nn.Module, network.decoder.head)
    if type(head) is Int8Linear:
        network.decoder.head = cast(nn.Linear, Int8Head(head, ops))
    for i, block in enumerate(network.decoder.blocks):
        if _is_decoder_block(block):
            blocks[i] = Int8Block(block, ops, is_last=i == len(blocks) - 1)


def _is_vision_block(block: nn.Module) -> bool:
    return type(block) is vision_transformer.Block and all(
        isinstance(linear, Int8Linear)
        for linear in (block.attn.qkv_proj, block.attn.out_proj, block.mlp.fc1, block.mlp.fc2)
    )


def _is_decoder_block(block: nn.Module) -> bool:
    known = (language_model.Block, language_model.Attention, language_model.MLP)
    return (type(block), type(getattr(block, "attn", None)), type(getattr(block, "mlp", None))) == known


class Int8VisionTransformer(nn.Module):
    """The vision encoder, which encodes one image at a time: scales belong to rows of one image."""

    def __init__(self, encoder: VisionTransformer, ops: EagerOps):
        super().__init__()
        self.patch_embedding, self.layer_norm = encoder.patch_embedding, _in_float32(encoder.layer_norm)
        self.blocks = nn.ModuleList(Int8VisionBlock(block, ops) for block in encoder.blocks)

    def forward(self, images: Tensor) -> Tensor:
        """See `VisionTransformer.forward`."""
        return torch.cat([self._encode(image) for image in images.split(1)]).to(images.dtype)

    def _encode(self, image: Tensor) -> Tensor:
        x = self.patch_embedding(image)[0].to(torch.float32, copy=True)
        for block in self.blocks:
            block(x, image.dtype)
        return self.layer_norm(x)[None]


class Int8VisionBlock(nn.Module):
    """A block of the encoder. An image's patches share a scale, but in an MLP's activations each has its own."""

    def __init__(self, block: vision_transformer.Block, ops: EagerOps):
        super().__init__()
        self.ops = ops
        linears = block.attn.qkv_proj, block.attn.out_proj, block.mlp.fc1, block.mlp.fc2
        self.qkv_proj, self.out_proj, self.fc1, self.fc2 = (Int8Matmul(cast(Int8Linear, layer)) for layer in linears)
        self.ln1, self.ln2 = _in_float32(block.ln1), _in_float32(block.ln2)
        self.n_heads = block.attn.n_heads

    def forward(self, x: Tensor, dtype: torch.dtype) -> None:
        """Update x (T, C) float32, the patches of one image; attention is computed in dtype."""
        T, C = x.shape
        qkv = self.qkv_proj(*self.ops.layer_norm_codes(x, self.ln1), dtype)
        y = self.ops.attention(*qkv.view(1, T, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)).view(T, C)
        y = self.out_proj(*self.ops.quantize_tensor(y))
        hidden = self.fc1(*self.ops.add_layer_norm(x, y, self.ln2), gelu=True)
        codes, scale = self.ops.quantize_rows(hidden, MIN_GELU)  # few rows may be far larger than the others
        self.ops.add_rows(x, self.fc2.unscaled(codes), scale, self.fc2.bias)


class Int8ModalityProjector(nn.Module):
    def __init__(self, projector: ModalityProjector, dtype: torch.dtype, ops: EagerOps):
        super().__init__()
        self.factor, self.dtype, self.ops = projector.factor, dtype, ops
        self.proj = Int8Matmul(cast(Int8Linear, projector.proj))

    def forward(self, x: Tensor) -> Tensor:
        """See `ModalityProjector.forward`."""
        x = pixel_shuffle(x, self.factor)
        y = self.proj.rows(*self.ops.quantize_rows(x.flatten(0, 1).to(torch.float32, copy=True)))
        return y.view(*x.shape[:2], -1).to(self.dtype)


class Int8Block(language_model.Block):
    """A decoder block with the given block's modules, whose int8 weights multiply int8 activations in a prefill.

    Every row has a scale of its own, so that sequences and padding of a batch do not affect each other. In a prefill
    the residual stream is float32 up to the last block, which returns the dtype of the norms.
    """

    def __init__(self, block: language_model.Block, ops: EagerOps, is_last: bool = True):
        nn.Module.__init__(self)
        self.ops, self.dtype, self.is_last = ops, block.norm1.weight.dtype, is_last
        self.norm1, self.attn, self.norm2, self.mlp = block.norm1, block.attn, block.norm2, block.mlp
        self.norm_weights = block.norm1.weight.detach().float(), block.norm2.weight.detach().float()
        attn, mlp = block.attn, block.mlp
        products = (
            (attn.q_proj, attn.k_proj, attn.v_proj),
            (attn.out_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        )
        self.qkv, self.out, self.gate_up, self.down = (Int8Matmul(*cast(list, linears)) for linears in products)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        block_kv_cache: KVCache | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, KVCache]:
        """The arguments of `Attention.forward`. One token per sequence is decoded with int8 weights alone."""
        B, T, C = x.shape
        if T == 1:
            return super().forward(x, cos, sin, mask, block_kv_cache, last_only)
        x = x.reshape(-1, C).float()
        q, kv = self._qkv(x.view(B, T, C), cos, sin, block_kv_cache)
        n_out = 1 if last_only else T
        mask = None if mask is None else mask[..., -n_out:, :]
        y = self.ops.attention(q[:, :, -n_out:], kv.key, kv.value, mask, causal=mask is None and n_out > 1)
        codes, scale = self.ops.quantize_rows(y.view(B * n_out, -1))
        rows = x.view(B, T, C)[:, -n_out:].reshape(-1, C).contiguous()
        y = self.out.unscaled(codes)
        rows, quantized = self.ops.add_rms_norm(rows, y, scale, self.norm_weights[1], self.norm2.eps)
        codes, scale = self.ops.swiglu(self.gate_up.unscaled(quantized[0], self.dtype), quantized[1])
        self.ops.add_rows(rows, self.down.unscaled(codes), scale, None)
        return rows.to(self.dtype if self.is_last else torch.float32).view(B, n_out, C), kv

    def _qkv(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> tuple[Tensor, KVCache]:
        """Rotated queries (B, H, T, D) of x (B, T, C) float32, and the cache with its keys and values."""
        (B, T, C), attn = x.shape, self.attn
        codes, scale = self.ops.rms_norm(x.view(-1, C), self.norm_weights[0], self.norm1.eps)
        angles = cos.reshape(-1, attn.head_dim), sin.reshape(-1, attn.head_dim)  # of T rows, or of B * T
        n_heads = attn.n_heads, attn.n_kv_heads
        parts = self.ops.rope(self.qkv.unscaled(codes), scale, *angles, n_heads, self.dtype)
        q, k, v = (part.view(B, T, -1, attn.head_dim).transpose(1, 2) for part in parts)
        return q, KVCache(k, v) if cache is None else cache.append(k, v)


class Int8Head(Int8Linear):
    """The given layer, which reads the whole vocabulary's weights for one token: bound by memory bandwidth."""

    def __init__(self, head: Int8Linear, ops: EagerOps):
        nn.Module.__init__(self)
        self.weight, self.scale, self.bias, self.ops = head.weight, head.scale, head.bias, ops

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features)."""
        if x[..., 0].numel() > 1 or self.bias is not None or x.dtype not in DTYPES:
            return super().forward(x)
        return self.ops.int8_gemv(x.reshape(1, -1), self.weight, self.scale).view(*x.shape[:-1], -1)


def _in_float32(norm: nn.LayerNorm) -> nn.LayerNorm:
    return norm if norm.weight.dtype == torch.float32 else copy.deepcopy(norm).float()
