"""Engines that run the same model on the CPU: this project, llama.cpp and OpenVINO."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.lib.hardware import at_level, current_level
from eval.peers import Engine, with_head
from eval.peers.llama_cpp_engine import LlamaCppEngine
from eval.peers.openvino_engine import OpenVINOEngine
from models.inference.kernels.load import WITHOUT_BF16_DOT
from models.vision_language_model import PrefillState
from nanovlm import PROMPT
from nanovlm.captioner import Captioner, ImageInput
from nanovlm.device import choose_dtype

BASELINES = ("plain", "llama.cpp", "openvino")
GGUF_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", "int8": "q8_0", "int4": "q4_0"}
QUANTIZED_BYTES = {"int8": (1, 1), "int4": (0.625, 1)}  # of an entry of the layers, and of the head


class NanoVLMEngine(Engine):
    """This project: the plain model, layer by layer as nanoVLM computes it, or its InferenceModel."""

    def __init__(self, captioner: Captioner, quantize: str | None = None, plain: bool = False):
        self.captioner = captioner
        self.state: PrefillState | None = None
        self.model: Any = captioner.model if plain else captioner.inference
        self.dtype = self.model.dtype
        level = getattr(captioner.inference.network, "level", "none")  # none where the kernels could not be built
        words = [str(self.dtype).removeprefix("torch."), quantize, level]
        self.name = "plain float32" if plain else " ".join(["nanovlm", *filter(None, words)])
        self.weight_bytes = self.dtype.itemsize
        if quantize:
            self.weight_bytes = with_head(*QUANTIZED_BYTES[quantize], self.model.cfg)
        if quantize == "int8" and level != "none":
            self.dtype = torch.int8

    def clear(self) -> None:
        self.state = None

    @torch.inference_mode()
    def append(self, ids: list[list[int]]) -> Tensor:
        new = torch.tensor(ids)
        if self.state is None or new.size(1) > 1:
            logits, self.state = self.model.prefill(new, prefix=self.state)
        else:
            logits, self.state = self.model.decode(new[:, 0], self.state)
        return logits

    @torch.inference_mode()
    def encode_image(self, image: Tensor) -> Tensor:
        ids = torch.full((1, self.model.cfg.mp_image_token_length), self.model.image_token_id)
        return self.model.embed(ids, image)

    @torch.inference_mode()
    def first_token(self, image: ImageInput) -> int:
        """Preprocess an image, encode it and prefill the default prompt."""
        ids, tiles = self.captioner.prepare(image, PROMPT)
        return int(self.model.prefill(torch.tensor([ids]), torch.cat(tiles))[0].argmax())


def plain_engine(folder: Path) -> NanoVLMEngine:
    """The model in folder as nanoVLM computes it, in float32: the reference of all other engines."""
    return NanoVLMEngine(Captioner.from_pretrained(folder, "cpu", "float32"), plain=True)


def choose_dtypes(names: Sequence[str], folder: Path | None) -> list[torch.dtype]:
    """The dtypes for the model in folder, of which auto depends on the current level."""
    return list(dict.fromkeys(choose_dtype(name, torch.device("cpu"), folder) for name in names))


def make_engines(
    plain: NanoVLMEngine,
    folder: Path,
    files: Path,
    dtypes: Sequence[str] = ("auto",),
    quantize: str | None = None,
    baselines: Sequence[str] = ("plain",),
    levels: Sequence[str] = (),
    batch_size: int = 1,
) -> list[Engine]:
    """Baselines on the model in folder, and this project in every dtype and at every level (default: the current one).

    With quantize all are also made with quantized weights, if they have these. Other engines' files go to `files`.
    Raises MissingExtraError if a baseline's package is not installed, InputError for a model that llama.cpp cannot run.
    """
    captioner, chosen = plain.captioner, choose_dtypes(dtypes, folder)
    engines: list[Engine] = [plain] if "plain" in baselines else []
    if "llama.cpp" in baselines:
        types = [GGUF_TYPES[key] for key in (*chosen, quantize) if key]
        engines += [LlamaCppEngine(captioner, name, files, batch_size) for name in types]
    if "openvino" in baselines:
        if current_level() in WITHOUT_BF16_DOT:  # OpenVINO computes bfloat16 in float32, but not if oneDNN is held
            chosen = list(dict.fromkeys(torch.float32 if dtype == torch.bfloat16 else dtype for dtype in chosen))
        engines += [OpenVINOEngine(captioner, dtype, files) for dtype in chosen]
        engines += [OpenVINOEngine(captioner, chosen[-1], files, int8=True)] if quantize == "int8" else []
    for level in levels or [current_level()]:
        with at_level(level):
            for dtype in choose_dtypes(dtypes, folder):
                for how in dict.fromkeys((None, quantize)):
                    name = str(dtype).removeprefix("torch.")
                    engines.append(NanoVLMEngine(Captioner.from_pretrained(folder, "cpu", name, quantize=how), how))
    return engines
