"""Decoder blocks for several tokens at once on a CPU, with the activations of a token in a column.

A weight (out, in) is then the left factor of its product with activations (in, n). Kernels pack the right factor into
their own layout in every call: here the activations of n tokens, which are few, and not the weight. So each weight is
read once, and nothing is stored twice. If the weights of queries, keys and values are adjacent, they are one product.
"""

from typing import cast

import torch
from torch import Tensor, nn

from models.attention import needs_grad_or_graph
from models.cache import KVCache
from models.inference.cpu_kernels import OneDNNLinear, has_onednn_linear
from models.inference.eager_ops import EagerOps
from models.inference.live_weights import adjacent
from models.language_model import MLP, Attention, Block, LanguageModel, RMSNorm

DTYPES = (torch.float32, torch.bfloat16)


class FusedBlock(Block):
    """A decoder block that computes by columns, for inference; it shares the modules of a plain block.

    Its output (B, T, C) is a view of a tensor (C, B, T), which the next fused block reads without a copy.
    """

    def __init__(self, block: Block, ops: EagerOps):
        nn.Module.__init__(self)  # Block's would make new weights
        self.ops = ops
        self.norm1, self.attn, self.norm2, self.mlp = block.norm1, block.attn, block.norm2, block.mlp
        self.qkv_weights = _adjacent_weights(block.attn.q_proj, block.attn.k_proj, block.attn.v_proj)
        self.gate_up_weights = _adjacent_weights(block.mlp.gate_proj, block.mlp.up_proj)

    @staticmethod
    def supports(block: Block) -> bool:
        """Whether the block is made of the model's own classes, on a CPU and in a precision that this is made for."""
        linears = [module for module in block.modules() if isinstance(module, (nn.Linear, OneDNNLinear))]
        known = (type(block), type(block.attn), type(block.mlp), type(block.norm1)) == (Block, Attention, MLP, RMSNorm)
        plain = len(linears) == 7 and all(type(x) in (nn.Linear, OneDNNLinear) and x.bias is None for x in linears)
        weights = list(block.parameters())
        return known and plain and all(w.device.type == "cpu" and w.dtype in DTYPES for w in weights)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        block_kv_cache: KVCache | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, KVCache]:
        """The arguments and results of `Block.forward`. A single token takes the plain block."""
        B, T, C = x.shape
        if B * T == 1 or needs_grad_or_graph():
            return super().forward(x, cos, sin, mask, block_kv_cache, last_only)
        columns, attn = x.permute(2, 0, 1).reshape(C, B * T).contiguous(), self.attn
        heads = self.ops.product(self.qkv_weights, self._rms_norm(columns, self.norm1).t())
        q, k, v = self.ops.rope_columns(heads, cos, sin, (attn.n_heads, attn.n_kv_heads), B)
        kv = KVCache(k, v) if block_kv_cache is None else block_kv_cache.append(k, v)

        if last_only:
            q, T = q[:, :, -1:], 1
            columns = columns.view(C, B, -1)[..., -1].contiguous()
            mask = None if mask is None else mask[..., -1:, :]
        causal = mask is None and T > 1  # correct without a past only; with one, several tokens come with a mask
        y = self.ops.attention(q, kv.key, kv.value, mask, causal).view(B * T, -1)
        columns = self.ops.product([attn.out_proj.weight], y, columns)

        gate, up = self.ops.product(self.gate_up_weights, self._rms_norm(columns, self.norm2).t()).chunk(2)
        hidden = self.ops.silu_mul(gate, up)
        columns = self.ops.product([self.mlp.down_proj.weight], hidden.t(), columns)
        return columns.view(C, B, T).permute(1, 2, 0), kv

    def _rms_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.ops.rms_norm_columns(x, norm.weight, norm.eps)


def fuse_decoder(decoder: LanguageModel, ops: EagerOps) -> None:
    """Replace the blocks of a decoder that can be fused; for CPUs and for inference only. Nothing without oneDNN."""
    blocks = cast(nn.ModuleList, decoder.blocks)
    for i, block in enumerate(decoder.blocks):
        if has_onednn_linear() and FusedBlock.supports(block):
            blocks[i] = FusedBlock(block, ops)


def _adjacent_weights(*linears: nn.Linear) -> list[Tensor]:
    """The weights of linear layers, as one matrix if they are adjacent in memory."""
    weights = [linear.weight.detach() for linear in linears]
    joined = adjacent(weights)
    return weights if joined is None else [joined]
