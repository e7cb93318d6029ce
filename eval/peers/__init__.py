"""Engines that run one model behind one interface: this project here, others beside it."""

import importlib
from typing import Any

import torch
from torch import Tensor

from models.cache import PrefillState, capacity_for
from models.config import VLMConfig
from models.inference.kernel_network import empty_cache
from models.vision_language_model import empty_model
from nanovlm import PROMPT
from nanovlm.captioner import Captioner
from nanovlm.errors import needs_extra
from nanovlm.request_runner import ImageInput

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
    is_ours = False  # whether its answers in float32 must be the plain model's

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


class PlainEngine(Engine):
    """The core's modules in float32, layer by layer as nanoVLM computes them."""

    name = "plain float32"

    def __init__(self, captioner: Captioner):
        self.captioner = captioner
        self.model = captioner.model
        self.state: PrefillState | None = None
        self.dtype = self.model.dtype
        self.weight_bytes = self.dtype.itemsize

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
        return self.model.encode_images(image.to(self.model.device))

    @torch.inference_mode()
    def first_token(self, image: ImageInput) -> int:
        """Preprocess an image, encode it and prefill the default prompt."""
        ids, tiles = self.captioner.prepare(image, PROMPT)
        device = self.model.device
        return int(self.model.prefill(torch.tensor([ids], device=device), torch.cat(tiles).to(device))[0].argmax())


class NanoVLMEngine(Engine):
    """This project's network, kernels or modules, called as `ContinuousBatch` calls it."""

    is_ours = True

    def __init__(self, captioner: Captioner, quantize: str | None = None):
        self.captioner = captioner
        self.clear()
        inference = captioner.inference
        level = getattr(self.network, "level", "none")  # none where the kernels could not be built
        self.dtype = torch.int8 if quantize == "int8" and level != "none" else inference.dtype
        self.name = " ".join(filter(None, ("nanovlm", str(inference.dtype).removeprefix("torch."), quantize, level)))
        self.weight_bytes = inference.dtype.itemsize
        if quantize:
            self.weight_bytes = with_head(*QUANTIZED_BYTES[quantize], inference.cfg)

    def clear(self) -> None:
        self.network = self.captioner.inference.network
        self.cache = empty_cache(self.network, 0, 0)
        self.length = 0

    @torch.inference_mode()
    def append(self, ids: list[list[int]]) -> Tensor:
        new = torch.tensor(ids, device=self.network.model.device)
        past = self.length
        slots = range(len(ids))
        self.length += new.size(1)
        if self.length > self.cache.size(4):
            old = self.cache
            self.cache = empty_cache(self.network, len(ids), capacity_for(self.length))
            if past:
                self.cache[..., :past, :] = old[..., :past, :]
        if past and new.size(1) == 1:
            return self.network.decode_tokens(new, self.cache, [past] * len(ids), slots)
        return self.network.prefill([*self.network.embed_tokens(new)], self.cache, past, slots)

    @torch.inference_mode()
    def encode_image(self, image: Tensor) -> Tensor:
        return self.captioner.inference.encode_images(image.to(self.network.model.device))

    def first_token(self, image: ImageInput) -> int:
        """Preprocess an image, encode it and prefill the default prompt."""
        (output,) = self.captioner.generate([self.captioner.request(image, PROMPT, max_new_tokens=1)])
        return output.token_id


def with_head(layers: float, head: float, cfg: VLMConfig) -> float:
    """Bytes of one entry of a decoder whose layers take other bytes than its head: the mean."""
    decoder = empty_model(cfg, -1).decoder
    share = decoder.head.weight.numel() / sum(parameter.numel() for parameter in decoder.parameters())
    return layers + (head - layers) * share


def import_peer(module: str, name: str, extra: str = "peers") -> Any:
    """A module of an extra, for what users call `name`; MissingExtraError if it is not installed."""
    with needs_extra(extra, name):
        return importlib.import_module(module)
