"""Engines that run the same model on the CPU: this project, llama.cpp and OpenVINO."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from eval.lib.cpu_levels import at_level, current_level
from eval.peers.llama_cpp_engine import LlamaCppEngine
from eval.peers.openvino_engine import OpenVINOEngine
from models.decoding import TokenSampler
from models.inference.kernels.load import WITHOUT_BF16_DOT
from models.vision_language_model import PrefillState
from nanovlm import PROMPT
from nanovlm.captioner import Captioner, ImageInput
from nanovlm.device import choose_dtype

BASELINES = ("plain", "llama.cpp", "openvino")
GGUF_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
QUANTIZED = {"int8": ("q8_0", 1), "int4": ("q4_0", 0.625)}  # llama.cpp's type, our bytes


@dataclass(frozen=True)
class EngineOptions:
    """Which engines to compare: this project in every configuration asked for, and baselines."""

    dtypes: Sequence[str] = ("auto",)
    quantize: str | None = None  # quantized weights beside unquantized ones
    baselines: Sequence[str] = ("plain",)
    batch_size: int = 1
    levels: Sequence[str] = ()  # of CPU instructions, for this project; empty is the current one

    def choose_dtypes(self, folder: Path) -> list[torch.dtype]:
        """The dtypes for the model in folder, of which auto depends on the level."""
        return list(dict.fromkeys(choose_dtype(name, torch.device("cpu"), folder) for name in self.dtypes))


class Engine(Protocol):
    """Greedy decoding of a batch of sequences of equal length; the engine keeps their cache."""

    name: str
    dtype: torch.dtype  # of activations
    weight_bytes: float  # of one entry of a weight matrix
    logits: Tensor  # (B, vocabulary) of the last step

    def prefill(self, ids: list[list[int]]) -> list[int]:
        """Start new sequences with these prompts; returns the next token of each."""

    def decode(self, ids: list[int]) -> list[int]:
        """Append one token to each sequence; returns the next token of each."""


@runtime_checkable
class ImageEngine(Engine, Protocol):
    """An engine that encodes images, too."""

    def encode_image(self, image: Tensor) -> Tensor:
        """Embeddings (1, T, C) of one preprocessed image (1, 3, S, S)."""


class NanoVLMEngine:
    """This project: the plain model, layer by layer as nanoVLM computes it, or its InferenceModel."""

    def __init__(self, name: str, captioner: Captioner, weight_bytes: float = 4, plain: bool = False):
        self.name, self.captioner, self.weight_bytes, self.plain = name, captioner, weight_bytes, plain
        self.model: Any = captioner.model if plain else captioner.inference
        self.dtype = self.model.dtype
        self.state: PrefillState | None = None
        self.logits = torch.empty(0)

    @torch.inference_mode()
    def prefill(self, ids: list[list[int]]) -> list[int]:
        self.logits, self.state = self.model.prefill(torch.tensor(ids))
        return TokenSampler()(self.logits).tolist()

    @torch.inference_mode()
    def decode(self, ids: list[int]) -> list[int]:
        self.logits, self.state = self.model.decode(torch.tensor(ids), self.state)
        return TokenSampler()(self.logits).tolist()

    @torch.inference_mode()
    def encode_image(self, image: Tensor) -> Tensor:
        """Embeddings (1, T, C) of one preprocessed image (1, 3, S, S)."""
        cfg = self.model.cfg
        return self.model.embed(torch.full((1, cfg.mp_image_token_length), self.model.image_token_id), image)

    @torch.inference_mode()
    def first_token(self, image: ImageInput) -> int:
        """Preprocess an image, encode it and prefill the default prompt."""
        ids, tiles = self.captioner.prepare(image, PROMPT)
        return int(TokenSampler()(self.model.prefill(torch.tensor([ids]), torch.cat(tiles))[0]))


def make_engines(plain: NanoVLMEngine, folder: Path, temporary: Path, options: EngineOptions) -> list[Engine]:
    """All engines on the model in folder, baselines first, of which plain is one; other engines' files go to temporary.

    Raises MissingExtraError if a baseline's package is not installed, InputError for a model that llama.cpp cannot run.
    """
    engines: list[Engine] = []
    for name in (name for name in BASELINES if name in options.baselines):
        engines += _baseline(name, plain, options.choose_dtypes(folder), temporary, options)
    for level in options.levels or [current_level()]:
        with at_level(level):
            for dtype in options.choose_dtypes(folder):
                engines += [_own(folder, dtype, quantize) for quantize in dict.fromkeys((None, options.quantize))]
    return engines


def _own(folder: Path, dtype: torch.dtype, quantize: str | None) -> NanoVLMEngine:
    """This project's engine at the current level."""
    precision = str(dtype).removeprefix("torch.")
    captioner = Captioner.from_pretrained(folder, "cpu", precision, quantize=quantize)
    level = getattr(captioner.inference.network, "level", "none")  # none where the kernels could not be built
    weight_bytes = QUANTIZED[quantize][1] if quantize else dtype.itemsize
    engine = NanoVLMEngine(" ".join(filter(None, ("nanovlm", precision, quantize, level))), captioner, weight_bytes)
    if quantize == "int8" and level != "none":
        engine.dtype = torch.int8
    return engine


def plain_engine(folder: Path) -> NanoVLMEngine:
    """The model in folder as nanoVLM computes it, in float32: the reference of all other engines."""
    captioner = Captioner.from_pretrained(folder, "cpu", "float32")
    return NanoVLMEngine("plain float32", captioner, plain=True)


def _baseline(
    name: str, plain: NanoVLMEngine, dtypes: Sequence[torch.dtype], temporary: Path, options: EngineOptions
) -> Sequence[Engine]:
    """A baseline in all dtypes that it has, and quantized if this project is."""
    captioner, quantize = plain.captioner, options.quantize
    if name == "plain":
        return [plain]
    if name == "llama.cpp":
        types = [GGUF_TYPES[dtype] for dtype in dtypes] + ([QUANTIZED[quantize][0]] if quantize else [])
        return [LlamaCppEngine(captioner, kind, temporary, options.batch_size) for kind in types]
    if current_level() in WITHOUT_BF16_DOT:  # OpenVINO then computes bfloat16 in float32, but not if oneDNN is held
        dtypes = list(dict.fromkeys(torch.float32 if dtype == torch.bfloat16 else dtype for dtype in dtypes))
    quantized = [OpenVINOEngine(captioner, dtypes[-1], temporary, int8=True)] if quantize == "int8" else []
    return [OpenVINOEngine(captioner, dtype, temporary) for dtype in dtypes] + quantized
