"""Greedy generation with the ONNX graphs of `nanovlm export --onnx`, run by ONNX Runtime or by another subclass."""

from abc import ABC, abstractmethod
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.peers import import_peer
from models.checkpoint import atomic_dir
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm.captioner import Captioner
from nanovlm.export.onnx import DECODER, SUFFIXES, VISION_ENCODER, check_onnx_extra, write_onnx

Feeds = dict[str, np.ndarray]


class OnnxEngine(ABC):
    """Embeds, keeps positions and chooses tokens; a subclass runs the graphs and keeps the cache.

    `logits` (B, vocabulary) are those of the last step.
    """

    def __init__(self, name: str, captioner: Captioner, weight_bytes: float, dtype: torch.dtype):
        self.name, self.weight_bytes, self.dtype = name, weight_bytes, dtype
        self.cfg, self.embedding = captioner.model.cfg, captioner.model.decoder.token_embedding
        self.length, self.logits = 0, torch.empty(0)

    @abstractmethod
    def run_vision_encoder(self, feeds: Feeds) -> np.ndarray:
        """Image features (N, T, C)."""

    @abstractmethod
    def run_decoder(self, feeds: Feeds) -> np.ndarray:
        """Logits (B, 1, vocabulary) after tokens that go to the cache; position 0 starts new sequences."""

    def encode_image(self, image: Tensor) -> Tensor:
        """Embeddings (1, T, C) of one preprocessed image (1, 3, S, S)."""
        return torch.from_numpy(self.run_vision_encoder(image_feeds(self.cfg, image)))

    def prefill(self, ids: list[list[int]]) -> list[int]:
        self.length = 0
        return self._next(ids)

    def decode(self, ids: list[int]) -> list[int]:
        return self._next([[token] for token in ids])

    def _next(self, ids: list[list[int]]) -> list[int]:
        with torch.inference_mode():
            feeds = text_feeds(self.embedding(torch.tensor(ids)).numpy(), self.length)
        self.logits = torch.from_numpy(self.run_decoder(feeds)).squeeze(1)
        self.length += len(ids[0])
        return self.logits.argmax(-1).tolist()


class OnnxRuntimeEngine(OnnxEngine):
    """`precision` is float32 or int8: weights of matrix products in 8 bits, their inputs rounded at run time."""

    def __init__(self, captioner: Captioner, precision: str, folder: Path):
        runtime = import_peer("onnxruntime", "ONNX Runtime")
        dtype = torch.int8 if precision == "int8" else torch.float32
        super().__init__(f"onnxruntime {precision}", captioner, dtype.itemsize, dtype)
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
        options.log_severity_level = 3
        graphs = export_graphs(captioner.model, folder)
        self.vision, self.decoder = (
            runtime.InferenceSession(graph_path(graphs, name, precision), options, providers=["CPUExecutionProvider"])
            for name in (VISION_ENCODER, DECODER)
        )
        self.to_value = runtime.OrtValue.ortvalue_from_numpy
        self.past: dict[str, Any] = {}

    def run_vision_encoder(self, feeds: Feeds) -> np.ndarray:
        return self.vision.run(["image_features"], feeds)[0]

    def run_decoder(self, feeds: Feeds) -> np.ndarray:
        names = past_names(self.cfg)
        if feeds["position_ids"][0, 0] == 0:
            self.past = dict.fromkeys(names, self.to_value(empty_past(self.cfg, len(feeds["position_ids"]))))
        values = {name: self.to_value(value) for name, value in feeds.items()} | self.past  # no copy of the cache
        logits, *present = self.decoder.run_with_ort_values(["logits", *names.values()], values)
        self.past = dict(zip(names, present))
        return logits.numpy()


def image_feeds(cfg: VLMConfig, image: Tensor) -> Feeds:
    """The vision encoder's inputs for one preprocessed image, scaled as the graph expects."""
    pixels = image * 2 - 1 if cfg.format.unit_pixels else image
    return {"pixel_values": pixels[None].numpy(), "pixel_attention_mask": np.ones((1, 1, *image.shape[2:]), bool)}


def text_feeds(embeds: np.ndarray, past: int) -> Feeds:
    """The decoder's inputs for embeddings (B, T, C) behind `past` cached tokens."""
    B, T, _ = embeds.shape
    positions = np.arange(past, past + T, dtype=np.int64)
    return {
        "inputs_embeds": embeds,
        "attention_mask": np.ones((B, past + T), np.int64),
        "position_ids": np.tile(positions, (B, 1)),
    }


def past_names(cfg: VLMConfig) -> dict[str, str]:
    """The decoder's inputs that hold keys and values, each with the output that continues it."""
    parts = [f"{i}.{part}" for i in range(cfg.lm_n_blocks) for part in ("key", "value")]
    return {f"past_key_values.{part}": f"present.{part}" for part in parts}


def empty_past(cfg: VLMConfig, batch_size: int) -> np.ndarray:
    """Keys or values of a layer before the first token."""
    return np.zeros((batch_size, cfg.lm_n_kv_heads, 0, cfg.lm_head_dim), np.float32)


def export_graphs(model: VisionLanguageModel, folder: Path) -> Path:
    """The model's graphs in float32 and int8, in a folder inside `folder` named by the weights; written if missing.

    The decoder's head reads the last token alone, as every engine for language models does in a prefill; the exported
    files compute logits of all tokens. Raises MissingExtraError without the extra onnx.
    """
    check_onnx_extra()
    digest = sha256(repr(model.cfg).encode())
    for weight in model.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    graphs = folder / f"onnx-{digest.hexdigest()[:12]}"
    if not graphs.exists():
        hook = model.decoder.norm.register_forward_pre_hook(lambda norm, inputs: (inputs[0][:, -1:],))
        with hook, atomic_dir(graphs) as new:
            write_onnx(model, new, ("float32", "int8"))
    return graphs


def graph_path(graphs: Path, name: str, dtype: str) -> Path:
    """The file of VISION_ENCODER or DECODER in float32 or int8."""
    return graphs / f"{name}{SUFFIXES[dtype]}.onnx"
