"""Other engines behind one interface, to measure beside ours."""

import importlib
from typing import Any

import torch
from torch import Tensor

from models.config import VLMConfig
from models.vision_language_model import empty_model
from nanovlm.errors import MissingExtraError


class Engine:
    """Greedy decoding of a batch of sequences of equal length; the engine keeps their cache.

    A subclass defines `clear` and `append`, and `first_token(image)` if it reads image files itself.
    """

    name: str
    dtype: torch.dtype  # of activations
    weight_bytes: float  # of one entry of the decoder's matrices, scales included
    logits = torch.empty(0)  # (B, vocabulary) of the last step
    resizes_images = False  # whether `encode_image` changes the pixels

    def clear(self) -> None:
        """Forget all sequences."""
        raise NotImplementedError

    def append(self, ids: list[list[int]]) -> Tensor:
        """Append equally many tokens to each sequence; the next logits (B, vocabulary), valid until the next call."""
        raise NotImplementedError

    def encode_image(self, image: Tensor) -> Tensor:
        """Embeddings (1, T, C) of one preprocessed image (1, 3, S, S)."""
        raise NotImplementedError

    def prefill(self, ids: list[list[int]]) -> list[int]:
        """Start new sequences with these prompts; returns the next token of each."""
        self.clear()
        self.logits = self.append(ids)
        return self.logits.argmax(-1).tolist()

    def decode(self, ids: list[int]) -> list[int]:
        """Append one token to each sequence; returns the next token of each."""
        self.logits = self.append([[token] for token in ids])
        return self.logits.argmax(-1).tolist()


def with_head(layers: float, head: float, cfg: VLMConfig) -> float:
    """Bytes of one entry of a decoder whose layers take other bytes than its head: the mean."""
    decoder = empty_model(cfg, -1).decoder
    share = decoder.head.weight.numel() / sum(parameter.numel() for parameter in decoder.parameters())
    return layers + (head - layers) * share


def import_peer(module: str, name: str) -> Any:
    """A module of the extra peers, for what users call `name`; MissingExtraError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(f'{name} needs the extra peers: pip install "nanovlm[peers]"') from None
