"""The decode step of one sequence, written for a compiler: each matrix-vector product is a reduction.

Single-sequence decoding is memory-bandwidth bound. `(weight.float() * x).sum(-1)` compiles, for every storage type, to
a loop that reads each weight once. Without a compiler this is the same arithmetic, slowly: float32 except for what the
weights and the cache are stored in.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.inference.quantization import Int8Linear
from models.language_model import Block, LanguageModel, rope_cos_sin


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
    """One decode step of one sequence with a decoder's weights."""

    def __init__(self, decoder: LanguageModel):
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor, position: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """ids (1,) at position (1,) int64: logits (1, vocabulary) float32.

        keys and values, (1, n_kv_heads, capacity, head_dim) per block, hold `position` tokens; the new one is written
        into them. What lies beyond must be finite, because attention multiplies it by 0.
        """
        half = self.decoder.cfg.lm_head_dim // 2
        cos, sin = torch.cat([angle[0, :half] for angle in rope_cos_sin(position, self.decoder.cfg)]).split(half)
        x = self.decoder.token_embedding(ids)[0].float()
        for block, key, value in zip(self.decoder.blocks, keys, values):
            x = decode_block(block, x, cos, sin, position, key, value)
        return gemv(self.decoder.head, materialize(self.decoder.norm(x)))[None]
