"""The decode step of one sequence, with blocks written for a compiler: each matrix-vector product is a reduction.

Single-sequence decoding is memory-bandwidth bound. `(weight.float() * x).sum(-1)` compiles, for every storage type, to
a loop that reads each weight once. Without a compiler this is the same arithmetic, slowly: float32 except for what the
weights and the cache are stored in. The head is one large product, for which torch's own kernels are as fast.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.inference.fused_decode_step import concat_linears
from models.inference.quantization import Int8Linear
from models.language_model import Block, LanguageModel, inverse_frequencies, rope_cos_sin

# x (C,), cos and sin (D / 2,) float32, position (1,) int64, key and value (1, n_kv_heads, capacity, D): x (C,)
BlockFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def materialize(x: Tensor) -> Tensor:
    """Make Inductor store x (..., n) instead of recomputing it for every user; torch.cat is a fusion barrier."""
    return torch.cat(x.chunk(2, dim=-1), dim=-1)


def gemv(linear: nn.Linear | Int8Linear, x: Tensor) -> Tensor:
    """The matrix-vector product of a linear layer without bias, nn.Linear or Int8Linear, in float32.

    x (in_features,) to (out_features,).
    """
    if isinstance(linear, Int8Linear):
        return (linear.weight.float() * x.float()).sum(-1) * linear.scale.float()
    # two rows at once keep more memory channels busy
    return torch.cat([(rows.float() * x.float()).sum(-1) for rows in linear.weight.chunk(2)])


def apply_rope_materialized(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`models.language_model.apply_rope` for x (heads, D), stored by the compiler; cos and sin (D / 2,)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def decode_block(
    block: Block, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """A block's forward for one token x (C,): cos and sin (D / 2,), key and value (1, n_kv_heads, capacity, D)."""
    attn, mlp, dtype = block.attn, block.mlp, block.attn.q_proj.weight.dtype
    dtype = dtype if dtype.is_floating_point else torch.float32  # of the factors; sums are float32
    h = materialize(block.norm1(x).to(dtype))
    q, k, v = (gemv(proj, h).view(-1, attn.head_dim) for proj in (attn.q_proj, attn.k_proj, attn.v_proj))
    key.index_copy_(2, position, apply_rope_materialized(k, cos, sin).to(key.dtype)[None, :, None])
    value.index_copy_(2, position, v.to(value.dtype)[None, :, None])

    q = apply_rope_materialized(q * attn.head_dim**-0.5, cos, sin).view(attn.n_kv_heads, -1, 1, attn.head_dim)
    scores = (q * key.transpose(0, 1).float()).sum(-1)  # (n_kv_heads, heads of a group, capacity)
    later = torch.arange(key.size(2), device=key.device) > position
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    y = (weights[..., None] * value.transpose(0, 1).float()).sum(-2)

    x = x + gemv(attn.out_proj, y.flatten().to(dtype))
    h = materialize(block.norm2(x).to(dtype))
    h = F.silu(gemv(mlp.gate_proj, h)) * gemv(mlp.up_proj, h)
    return x + gemv(mlp.down_proj, h.to(dtype))


class DecodeStep(nn.Module):
    """One decode step of one sequence with a decoder's weights; the blocks may be given as compiled functions."""

    def __init__(self, decoder: LanguageModel, blocks: Sequence[BlockFunction] | None = None):
        super().__init__()
        self.decoder = decoder
        self.run_blocks = blocks or [partial(decode_block, block) for block in decoder.blocks]
        self.head = concat_linears(decoder.head)
        cfg, device = decoder.cfg, decoder.norm.weight.device
        self.frequencies = inverse_frequencies(cfg.lm_head_dim, cfg.lm_re_base, device)

    def forward(self, ids: Tensor, position: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """ids (1,) at position (1,) int64: logits (1, vocabulary).

        keys and values, (1, n_kv_heads, capacity, head_dim) per block, hold `position` tokens; the new one is written
        into them. What lies beyond must be finite, because attention multiplies it by 0.
        """
        decoder, half = self.decoder, self.decoder.cfg.lm_head_dim // 2
        cos, sin = (angle[0, :half] for angle in rope_cos_sin(position, decoder.cfg, self.frequencies))
        x = decoder.token_embedding(ids)[0].float()
        for run_block, key, value in zip(self.run_blocks, keys, values):
            x = run_block(x, cos, sin, position, key, value)
        return self.head(decoder.norm(x[None]).to(decoder.norm.weight.dtype))
