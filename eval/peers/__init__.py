"""Engines that run one model behind one interface: this project here, others beside it."""

import importlib
from typing import Any

import torch
from torch import Tensor

from models.config import VLMConfig
from models.vision_language_model import PrefillState, empty_model
from nanovlm import PROMPT
from nanovlm.captioner import Captioner, ImageInput
from nanovlm.errors import MissingExtraError

QUANTIZED_BYTES = {"int8": (1, 1), "int4": (0.625, 1)}  # of an entry of the layers, and of the head


class Engine:
    """Greedy decoding of a batch of sequences of equal length; the engine keeps their cache.

    An engine that reads image files itself also has `first_token(image)`.
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


class NanoVLMEngine(Engine):
    """This project: the plain model, layer by layer as nanoVLM computes it, or its InferenceModel."""

    def __init__(self, captioner: Captioner, quantize: str | None = None, plain: bool = False):
        self.captioner = captioner
        self.state: PrefillState | None = None
        self.model: Any = captioner.model if plain else captioner.inference
        self.dtype = self.model.dtype
        self.weight_bytes = self.model.dtype.itemsize
        level = getattr(captioner.inference.network, "level", "none")  # none where the kernels could not be built
        words = ("nanovlm", str(self.dtype).removeprefix("torch."), quantize, level)
        self.name = "plain float32" if plain else " ".join(filter(None, words))
        if quantize:
            self.weight_bytes = with_head(*QUANTIZED_BYTES[quantize], self.model.cfg)
        if quantize == "int8" and level != "none":
            self.dtype = torch.int8

    def clear(self) -> None:
        self.state = None

    @torch.inference_mode()
    def append(self, ids: list[list[int]]) -> Tensor:
        new = torch.tensor(ids, device=self.model.device)
        if self.state is None or new.size(1) > 1:
            logits, self.state = self.model.prefill(new, prefix=self.state)
        else:
            logits, self.state = self.model.decode(new[:, 0], self.state)
        return logits

    @torch.inference_mode()
    def encode_image(self, image: Tensor) -> Tensor:
        device = self.model.device
        ids = torch.full((1, self.model.cfg.mp_image_token_length), self.model.image_token_id, device=device)
        return self.model.embed(ids, image.to(device))

    @torch.inference_mode()
    def first_token(self, image: ImageInput) -> int:
        """Preprocess an image, encode it and prefill the default prompt."""
        ids, tiles = self.captioner.prepare(image, PROMPT)
        device = self.model.device
        return int(self.model.prefill(torch.tensor([ids], device=device), torch.cat(tiles).to(device))[0].argmax())


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
