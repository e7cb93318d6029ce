"""Attention, products, and what is computed between them, in PyTorch; `models.inference.compiled_ops` is the same in C.

Most operations end in codes and scales for the next int8 product, see `models.inference.int8_activations`, or start
from a product whose rows must first be multiplied by their scales. Tensors are contiguous and float32 where nothing
else is stated.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import attention
from models.inference import int8_activations
from models.inference.cpu_kernels import onednn_linear, onednn_linear_add, onednn_linear_gelu
from models.inference.quantization import int8_matmul

Rows = tuple[Tensor, Tensor]  # codes (M, K) uint8 and a scale for each row (M, 1)
Codes = tuple[Tensor, float]  # codes (M, K) uint8 and one scale


class EagerOps:
    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """`models.attention.attention` of the same arguments, with a token's heads in a row: (B, T, H * D)."""
        if q.dtype == torch.float32 and q.stride(2) > q.size(1) * q.size(3):  # rows far apart slow attention down
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return attention(q, k, v, mask, causal).transpose(1, 2).flatten(2)

    def product(self, weights: Sequence[Tensor], x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Weights (out, in), below each other, times the transpose of x (n, in): (out, n).

        residual (out, n) is added, if given, with one weight. Rows or columns of x are adjacent.
        """
        if residual is not None:
            return onednn_linear_add(weights[0], x, None, residual)
        parts = [onednn_linear(weight, x, None) for weight in weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def layer_norm(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        """LayerNorm of x (..., C), float32 or bfloat16."""
        return norm(x)

    def linear_gelu(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """GELU of a linear layer's output on x (..., in), float32 or bfloat16 as its weights."""
        return onednn_linear_gelu(x, linear.weight, linear.bias)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, of matrices of one shape, float32 or bfloat16; gate may be overwritten."""
        return F.silu(gate, inplace=True).mul_(up)

    def quantize_rows(self, x: Tensor, lowest: float | None = None) -> Rows:
        """Codes of x (M, K) float32 or bfloat16, which may be overwritten; no entry falls below lowest, if given."""
        return int8_activations.quantize_rows(x.float(), lowest)

    def quantize_tensor(self, x: Tensor) -> Codes:
        """Codes of x (M, K) float32 or bfloat16, which may be overwritten."""
        return int8_activations.quantize_tensor(x.float())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        """Codes of RMSNorm of x (M, C): the root mean square of a row changes its scale alone."""
        codes, scale = int8_activations.quantize_rows(x * weight)
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1))
        return codes, scale.mul_(mean_square.add_(eps).rsqrt_())

    def add_rms_norm(self, x: Tensor, y: Tensor, scale: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Rows]:
        """x + scale * y (M, C) with scale (M, 1), and codes of its RMSNorm."""
        x = torch.addcmul(x, y, scale)
        return x, self.rms_norm(x, weight, eps)

    def swiglu(self, gate_up: Tensor, scale: Tensor) -> Rows:
        """Codes of silu(gate) * up, of scale (M, 1) times gates and ups (M, 2 * K), float32 or bfloat16."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        codes, without_up = int8_activations.quantize_rows(F.silu(gate * scale, inplace=True).mul_(up))
        return codes, without_up.mul_(scale)

    def rope(
        self, heads: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, n_heads: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (M, H, D), rotated keys (M, H_kv, D) and values in dtype, of scale times heads (M, ...).

        n_heads is H and H_kv; cos and sin (T, D) are the angles of the first T rows, of the next T rows, and so on.
        """
        (n_q, n_kv), (T, D) = n_heads, cos.shape
        heads = heads.mul_(scale).view(-1, T, n_q + 2 * n_kv, D)
        sin = torch.cat([-sin[:, : D // 2], sin[:, D // 2 :]], dim=-1)[:, None]
        rotated = heads[:, :, : n_q + n_kv]
        rotated = torch.addcmul(rotated * cos[:, None], rotated.roll(D // 2, -1), sin)
        parts = rotated[:, :, :n_q], rotated[:, :, n_q:], heads[:, :, n_q + n_kv :]
        q, k, v = (part.to(dtype, copy=True).flatten(0, 1) for part in parts)  # no part keeps the others' memory alive
        return q, k, v

    def int8_gemv(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """x (1, in) float32 or bfloat16 times the transpose of int8 weight (out, in) with scale (out,): (1, out)."""
        return int8_matmul(x, weight, scale)

    def rms_norm_columns(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of the columns of x (C, M), float32 or bfloat16, by a weight (C,) of x's dtype."""
        wide = x.float()
        scale = (wide.square().mean(0) + eps).rsqrt()
        return (wide * scale).mul_(weight.float()[:, None]).type_as(x)  # mixed types take three times as long

    def rope_columns(
        self, heads: Tensor, cos: Tensor, sin: Tensor, n_heads: tuple[int, int], batch_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, H, T, D), rotated keys (B, H_kv, T, D) and values of heads ((H + 2 * H_kv) * D, B * T).

        heads is float32 or bfloat16; cos and sin are (T, D) or (B, 1, T, D).
        """
        (n_q, n_kv), half = n_heads, cos.size(-1) // 2
        heads = heads.view(-1, 2 * half, batch_size, heads.size(1) // batch_size).permute(2, 0, 3, 1).contiguous()
        wide = heads[:, : n_q + n_kv].float()
        rotated = wide * cos
        rotated[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-1)
        rotated[..., half:].addcmul_(wide[..., :half], sin[..., half:])
        rotated = rotated.type_as(heads)
        # copies: a cache must not keep the queries' memory alive
        return rotated[:, :n_q], rotated[:, n_q:].clone(), heads[:, n_q + n_kv :].clone()

    def layer_norm_codes(self, x: Tensor, norm: nn.LayerNorm) -> Codes:
        """Codes of LayerNorm of x (M, C)."""
        return int8_activations.quantize_tensor(norm(x))

    def add_layer_norm(self, x: Tensor, y: Tensor, norm: nn.LayerNorm) -> Codes:
        """Add y to x (M, C) in place, and return codes of the sum's LayerNorm."""
        return self.layer_norm_codes(x.add_(y), norm)

    def add_rows(self, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """Add scale * y (M, C) with scale (M, 1), and bias (C,), to x in place."""
        x.addcmul_(y, scale)
        if bias is not None:
            x.add_(bias)
