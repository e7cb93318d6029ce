"""SigLIP's vision transformer (Zhai et al. 2023): patches by convolution, learned positions, pre-norm blocks."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import attention
from models.config import VLMConfig


def position_ids(cfg: VLMConfig) -> list[int] | None:
    """The position of each patch of a tile, row by row; None where they are 0, 1, 2 ..., as in nearly all models."""
    sides = None if cfg.format is None else cfg.format.patch_positions(cfg.vit_grid)
    if sides is None or sides == list(range(cfg.vit_grid)):
        return None
    return [row * cfg.vit_grid + column for row in sides for column in sides]


class PatchEmbedding(nn.Module):
    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.conv = nn.Conv2d(3, cfg.vit_hidden_dim, kernel_size=cfg.vit_patch_size, stride=cfg.vit_patch_size)
        self.position_embedding = nn.Parameter(torch.empty(1, cfg.vit_grid**2, cfg.vit_hidden_dim))
        self.position_ids = position_ids(cfg)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv(images).flatten(2).transpose(1, 2).contiguous()  # else every block copies its input
        positions = self.position_embedding
        return patches + (positions if self.position_ids is None else positions[:, self.position_ids])


class Attention(nn.Module):
    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.n_heads = cfg.vit_n_heads
        self.qkv_proj = nn.Linear(cfg.vit_hidden_dim, 3 * cfg.vit_hidden_dim)
        self.out_proj = nn.Linear(cfg.vit_hidden_dim, cfg.vit_hidden_dim)
        self.dropout = nn.Dropout(cfg.vit_dropout)
        self.attend = attention  # an add-on may set another function of these arguments

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv_proj(x).view(B, T, 3, self.n_heads, C // self.n_heads).permute(2, 0, 3, 1, 4)
        y = self.attend(q, k, v, dropout_p=self.dropout.p if self.training else 0.0)
        return self.dropout(self.out_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.fc1 = nn.Linear(cfg.vit_hidden_dim, cfg.vit_inter_dim)
        self.fc2 = nn.Linear(cfg.vit_inter_dim, cfg.vit_hidden_dim)
        self.dropout = nn.Dropout(cfg.vit_dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc2(F.gelu(self.fc1(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.ln1 = nn.LayerNorm(cfg.vit_hidden_dim, eps=cfg.vit_ln_eps)
        self.attn = Attention(cfg)
        self.ln2 = nn.LayerNorm(cfg.vit_hidden_dim, eps=cfg.vit_ln_eps)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class VisionTransformer(nn.Module):
    blocks: list[Block]  # an nn.ModuleList, typed by its elements

    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.patch_embedding = PatchEmbedding(cfg)
        self.dropout = nn.Dropout(cfg.vit_dropout)
        self.blocks = cast(list[Block], nn.ModuleList(Block(cfg) for _ in range(cfg.vit_n_blocks)))
        self.layer_norm = nn.LayerNorm(cfg.vit_hidden_dim, eps=cfg.vit_ln_eps)

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, 3, S, S) with S = vit_img_size to patches (N, vit_grid^2, vit_hidden_dim), row-major."""
        x = self.dropout(self.patch_embedding(images))
        for block in self.blocks:
            x = block(x)
        return self.layer_norm(x)
