"""Helpers of the tests: small models and images here, command line, server and checkpoints in the modules."""

import random
import struct
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

from models.inference.proof import ADAPTERS, Proof

ROOT = Path(__file__).parents[2]

TINY = {
    "vit_hidden_dim": 16, "vit_inter_dim": 24, "vit_n_heads": 2, "vit_n_blocks": 2,
    "vit_patch_size": 4, "vit_img_size": 16, "max_img_size": 32,
    "lm_hidden_dim": 24, "lm_inter_dim": 32, "lm_n_heads": 6, "lm_n_kv_heads": 2, "lm_n_blocks": 2,
    "lm_vocab_size": 40, "lm_re_base": 100, "lm_max_position_embeddings": 64,
    "mp_pixel_shuffle_factor": 2, "mp_image_token_length": 4,
}  # fmt: skip


class Package:
    """A package outside the base dependencies, imported on first use; a test that uses it is skipped without it."""

    def __init__(self, name: str, **options: Any):
        self.name, self.options = name, options  # of importorskip

    def __getattr__(self, attribute: str) -> Any:
        return getattr(pytest.importorskip(self.name, **self.options), attribute)


transforms = Package("torchvision.transforms", exc_type=(ImportError, RuntimeError))  # made for another torch


@torch.no_grad()
def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Fill in weights like a trained model's: attention is far from uniform, and no norm or bias is trivial."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.3 * torch.randn_like(parameter)
        else:
            parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter[0].numel() ** -0.5)
    return model


@contextmanager
def watch(module):
    """Record the shape of the first input of every call of a module, which kernels would replace."""
    shapes = []
    hook = module.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    try:
        with mock.patch.object(Proof, "difference", lambda proof: ADAPTERS):  # by modules, in batches
            yield shapes
    finally:
        hook.remove()


def noise_image(width=60, height=40, seed=0):
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))


def png(width, height):
    """A PNG with an honest header, of any size, and hardly any data."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
