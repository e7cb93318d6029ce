"""The eager decode step of one sequence on a CPU, in few operations.

A plain decode step runs some forty small operations per block, and starting one takes as long as what it computes. Here
products that read the same vector are one where their weights are adjacent in memory, and the rest is fused where torch
has a fused operation. The step reads the decoder's own weights and holds no copies.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.inference.cpu_kernels import OneDNNLinear
from models.inference.fused_prefill import FusedBlock
from models.inference.int4 import Int4Linear, int4_gemv
from models.inference.int8_blocks import Int8Block
from models.inference.live_weights import adjacent
from models.inference.quantization import Int8Linear, int8_gemv
from models.language_model import MLP, Attention, Block, LanguageModel, RMSNorm, inverse_frequencies, rope_cos_sin

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # float64 keeps its precision in the blocks only

# ids (1,) at position (1,) int64, keys and values (1, n_kv_heads, capacity, head_dim) per block: logits (1, vocabulary)
DecodeFunction = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
Matmul = Callable[[Tensor], Tensor]  # x (1, in) to (1, out)


class FusedDecodeStep:
    """A DecodeFunction that computes what the decoder's blocks compute, with their weights."""

    def __init__(self, decoder: LanguageModel):
        self.decoder, cfg = decoder, decoder.cfg
        self.frequencies = inverse_frequencies(cfg.lm_head_dim, cfg.lm_re_base)
        self.head = concat_linears(decoder.head)
        self.blocks = []
        for block in decoder.blocks:
            attn, mlp = block.attn, block.mlp
            qkv_proj, gate_up_proj = (
                concat_linears(attn.q_proj, attn.k_proj, attn.v_proj),
                concat_linears(mlp.gate_proj, mlp.up_proj),
            )
            matmuls = (qkv_proj, concat_linears(attn.out_proj), gate_up_proj, concat_linears(mlp.down_proj))
            self.blocks.append((block.norm1.weight, block.norm2.weight, *matmuls))

    @staticmethod
    def supports(decoder: LanguageModel) -> bool:
        """Whether the blocks are the model's own classes, in a precision and on a device that the step is made for."""
        weight = decoder.norm.weight
        known = all(
            type(block) in (Block, FusedBlock, Int8Block)
            and (type(block.attn), type(block.mlp), type(block.norm1)) == (Attention, MLP, RMSNorm)
            for block in decoder.blocks
        )
        return known and weight.device.type == "cpu" and weight.dtype in DTYPES

    def __call__(self, ids: Tensor, position: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """ids (1,) at position (1,): logits (1, vocabulary); keys and values (1, n_kv_heads, capacity, D) per block."""
        decoder, cfg, here = self.decoder, self.decoder.cfg, int(position)
        n_q, n_kv, D, eps = cfg.lm_n_heads, cfg.lm_n_kv_heads, cfg.lm_head_dim, cfg.lm_rms_eps
        cos, sin = rope_cos_sin(position, cfg, self.frequencies)
        sin = torch.cat([-sin[:, : D // 2], sin[:, D // 2 :]], dim=-1)
        x = decoder.token_embedding(ids)
        for (norm1, norm2, qkv_proj, out_proj, gate_up_proj, down_proj), key, value in zip(self.blocks, keys, values):
            heads = qkv_proj(_rms_norm(x, norm1, eps)).view(-1, D)
            rotated = heads[: n_q + n_kv].float()
            rotated = torch.addcmul(rotated * cos, rotated.roll(D // 2, -1), sin).to(x.dtype)
            key[0, :, here], value[0, :, here] = rotated[n_q:], heads[n_q + n_kv :]
            q = rotated[:n_q].view(1, n_kv, -1, D)
            y = F.scaled_dot_product_attention(q, key[:, :, : here + 1], value[:, :, : here + 1])
            x = out_proj(y.view(1, -1)).add_(x)
            gate, up = gate_up_proj(_rms_norm(x, norm2, eps)).chunk(2, dim=-1)
            x = down_proj(F.silu(gate).mul_(up)).add_(x)
        return self.head(_rms_norm(x, decoder.norm.weight, eps))


def concat_linears(*linears: nn.Linear | Int8Linear | Int4Linear) -> Matmul:
    """A function that gives the outputs of linear layers on one input, concatenated.

    If the layers are of one plain kind and their weights are adjacent in memory, it is a single product.
    """
    kinds: set[type] = {type(linear) for linear in linears}
    weights = [linear.weight for linear in linears]
    if any(getattr(linear, "bias", None) is not None for linear in linears):
        kinds = set()
    if kinds == {nn.Linear} and (weight := adjacent(weights)) is not None:
        return partial(F.linear, weight=weight)
    if kinds == {Int8Linear}:
        weight, scale = adjacent(weights), adjacent([x.scale for x in linears if isinstance(x, Int8Linear)])
        if weight is not None and scale is not None:
            return int8_gemv(weight, scale)
    if kinds == {Int4Linear} and (matmul := int4_gemv([x for x in linears if isinstance(x, Int4Linear)])) is not None:
        return matmul
    if len(linears) == 1:
        return linears[0].forward if kinds == {OneDNNLinear} else linears[0]
    matmuls = [concat_linears(linear) for linear in linears]
    return lambda x: torch.cat([matmul(x) for matmul in matmuls], dim=-1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x (1, C) whose sum is float32, in the fewest operations."""
    wide = x[0].float()
    return x * (float(wide @ wide) / len(wide) + eps) ** -0.5 * weight
