"""The decode step of one sequence on a CPU without a compiler: few operations, each of which has much to read.

A token passes through some forty small operations a block, and starting one takes as long as what it does. Here
products that read the same vector are one, and the rest is as little as can be; the arithmetic is that of the blocks.
`use_step` is how a model comes to decode by this step, or by another of the same signature.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.language_model import LanguageModel, rope_cos_sin
from models.vision_language_model import PrefillState, VisionLanguageModel

Step = Callable[[Tensor, Tensor, list[Tensor], list[Tensor]], Tensor]  # as `models.inference.decode_step.DecodeStep.forward`


def join(*linears: nn.Linear) -> nn.Linear:
    """Linears without biases, of one class, as one; their weights become views of the whole, which is no copy then."""
    whole = nn.Linear(linears[0].in_features, sum(one.out_features for one in linears), bias=False, device="meta")
    whole.__class__ = type(linears[0])
    for name in dict(linears[0].named_parameters()):  # the weight, and an Int8Linear's scale
        tensor = torch.cat([getattr(one, name).detach() for one in linears])
        setattr(whole, name, nn.Parameter(tensor, requires_grad=False))
        for one, part in zip(linears, tensor.split([one.out_features for one in linears])):
            getattr(one, name).data = part
    return whole


def product(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """linear without what calling a module costs."""
    return partial(F.linear, weight=linear.weight) if linear.weight.is_floating_point() else linear.forward


class JoinedStep:
    """`models.inference.decode_step.DecodeStep` for a CPU, with a decoder's weights, some of which it lays side by side."""

    def __init__(self, decoder: LanguageModel):
        self.decoder, self.blocks = decoder, []
        for block in decoder.blocks:
            attn, mlp = block.attn, block.mlp
            linears = (join(attn.q_proj, attn.k_proj, attn.v_proj), attn.out_proj)
            linears += (join(mlp.gate_proj, mlp.up_proj), mlp.down_proj)
            self.blocks.append((block.norm1.weight, block.norm2.weight, *map(product, linears)))

    def __call__(self, ids: Tensor, position: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """ids (1,) at position (1,): logits (1, vocabulary); keys and values (1, n_kv_heads, capacity, D) per block."""
        decoder, cfg, place = self.decoder, self.decoder.cfg, int(position)
        n_q, n_kv, D, eps = cfg.lm_n_heads, cfg.lm_n_kv_heads, cfg.lm_head_dim, cfg.lm_rms_eps
        cos, sin = rope_cos_sin(position, cfg)
        sin = torch.cat([-sin[:, : D // 2], sin[:, D // 2 :]], dim=-1)
        x = decoder.token_embedding(ids)
        for (norm1, norm2, qkv_proj, out_proj, gate_up_proj, down_proj), key, value in zip(self.blocks, keys, values):
            heads = qkv_proj(norm(x, norm1, eps)).view(-1, D)
            turned = heads[: n_q + n_kv].float()
            turned = torch.addcmul(turned * cos, turned.roll(D // 2, -1), sin).to(x.dtype)
            key[0, :, place], value[0, :, place] = turned[n_q:], heads[n_q + n_kv :]
            q = turned[:n_q].view(1, n_kv, -1, D)
            y = F.scaled_dot_product_attention(q, key[:, :, : place + 1], value[:, :, : place + 1])
            x = out_proj(y.view(1, -1)).add_(x)
            gate, up = gate_up_proj(norm(x, norm2, eps)).chunk(2, dim=-1)
            x = down_proj(F.silu(gate).mul_(up)).add_(x)
        return decoder.head(norm(x, decoder.norm.weight, eps))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x (1, C), whose sum is float32, in operations that torch has as one."""
    wide = x[0].float()
    return x * (float(wide @ wide) / len(wide) + eps) ** -0.5 * weight


def use_step(model: VisionLanguageModel, step: Step | None) -> None:
    """Let model decode single sequences by step, or with None as it did. In place.

    Caches stay KVCaches, so that both ways can take turns.
    """

    def decode(ids: Tensor, prefix: PrefillState) -> tuple[Tensor, PrefillState]:
        full = prefix.length >= model.cfg.lm_max_position_embeddings  # which the usual way refuses
        if len(ids) > 1 or prefix.attention_mask is not None or full or torch.is_grad_enabled():
            return VisionLanguageModel.decode(model, ids, prefix)
        kv_cache = [kv.reserve(1) for kv in prefix.kv_cache]
        keys, values = zip(*(kv.buffer for kv in kv_cache))
        return step(ids, torch.tensor([prefix.length], device=ids.device), keys, values), PrefillState(kv_cache)

    model.__dict__.pop("decode", None)
    if step is not None:
        model.decode = decode


def use_joined(model: VisionLanguageModel) -> None:
    """Let model decode by a JoinedStep, on a CPU and below float32. In place.

    Files are mostly float32: read as such, weights stay mapped, and what is joined would take memory of its own.
    """
    decoder = model.decoder
    if model.device.type == "cpu" and decoder.blocks[0].attn.q_proj.weight.dtype != torch.float32:
        use_step(model, JoinedStep(decoder))
