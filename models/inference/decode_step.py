"""The decode step of one sequence, written for a compiler: each product of a matrix and a vector is a reduction.

For one row of tokens, decoding is as fast as memory gives the weights. `(weight.float() * x).sum(-1)` compiles,
whatever the weights are stored in, to a loop that reads each of them once. Run without a compiler, this is the same
arithmetic, slowly: float32 but for what the weights and the cache are stored in.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.language_model import Block, LanguageModel, rope_cos_sin


def keep(x: Tensor) -> Tensor:
    """x (..., n), for good: what torch.cat joins is stored, while other results are computed anew wherever they go."""
    return torch.cat(x.chunk(2, dim=-1), dim=-1)


def product(linear: nn.Linear, x: Tensor) -> Tensor:
    """What a Linear without bias makes of x (in_features,): (out_features,) float32."""
    if linear.weight.is_floating_point():  # two rows at once keep more of memory at work
        return torch.cat([(rows.float() * x.float()).sum(-1) for rows in linear.weight.chunk(2)])
    return (linear.weight.float() * x.float()).sum(-1) * linear.scale.float()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`models.language_model.apply_rope`, of x (heads, D), so that the compiler keeps the result; cos and sin (D / 2,)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def step_block(
    block: Block, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """A block's forward for one token x (C,): cos and sin (D / 2,); the cache (1, n_kv_heads, capacity, D) twice."""
    attn, mlp, dtype = block.attn, block.mlp, block.attn.q_proj.weight.dtype
    dtype = dtype if dtype.is_floating_point else torch.float32  # of what is multiplied; sums are float32
    h = keep(block.norm1(x).to(dtype))
    q, k, v = (product(proj, h).view(-1, attn.head_dim) for proj in (attn.q_proj, attn.k_proj, attn.v_proj))
    key.index_copy_(2, position, turn(k, cos, sin).to(key.dtype)[None, :, None])
    value.index_copy_(2, position, v.to(value.dtype)[None, :, None])

    q = turn(q * attn.head_dim**-0.5, cos, sin).view(attn.n_kv_heads, -1, 1, attn.head_dim)
    scores = (q * key.transpose(0, 1).float()).sum(-1)  # (n_kv_heads, heads that share, capacity)
    later = torch.arange(key.size(2), device=key.device) > position
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    y = (weights[..., None] * value.transpose(0, 1).float()).sum(-2)

    x = x + product(attn.out_proj, y.flatten().to(dtype))
    h = keep(block.norm2(x).to(dtype))
    h = F.silu(product(mlp.gate_proj, h)) * product(mlp.up_proj, h)
    return x + product(mlp.down_proj, h.to(dtype))


class DecodeStep(nn.Module):
    """One more token of one sequence, with the weights of a decoder."""

    def __init__(self, decoder: LanguageModel):
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor, position: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """ids (1,) at position (1,) int64: logits (1, vocabulary) float32.

        keys and values, (1, n_kv_heads, capacity, head_dim) per block, hold `position` tokens and take one more in
        place. What stands after it must be finite, because attention multiplies it by 0.
        """
        half = self.decoder.cfg.lm_head_dim // 2
        cos, sin = torch.cat([angle[0, :half] for angle in rope_cos_sin(position, self.decoder.cfg)]).split(half)
        x = self.decoder.token_embedding(ids)[0].float()
        for block, key, value in zip(self.decoder.blocks, keys, values):
            x = step_block(block, x, cos, sin, position, key, value)
        return product(self.decoder.head, keep(self.decoder.norm(x)))[None]
