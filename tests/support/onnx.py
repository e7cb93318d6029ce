"""Consumers of the ONNX graphs: onnxruntime and OpenVINO, and greedy generation with either."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from nanovlm.export.onnx import DECODER, EMBED_TOKENS, VISION_ENCODER

Graph = Callable[[dict[str, np.ndarray]], list[np.ndarray]]
NAMES = (VISION_ENCODER, EMBED_TOKENS, DECODER)


def onnxruntime_graphs(folder: Path, suffix: str = "") -> dict[str, Graph]:
    import onnxruntime

    paths = {name: folder / f"{name}{suffix}.onnx" for name in NAMES}
    options = {"providers": ["CPUExecutionProvider"]}
    return {name: partial(onnxruntime.InferenceSession(paths[name], **options).run, None) for name in NAMES}


def openvino_graphs(folder: Path, suffix: str = "") -> dict[str, Graph]:
    import openvino

    core, hints = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = {name: core.compile_model(folder / f"{name}{suffix}.onnx", "CPU", hints) for name in NAMES}
    return {name: lambda inputs, model=model: list(model(inputs).values()) for name, model in compiled.items()}


def image_inputs(images: np.ndarray, rows: list[int]) -> dict[str, np.ndarray]:
    """Images in [0, 1], (N, 3, S, S), as SmolVLM's processor gives them for rows with so many images each."""
    size, taken = images.shape[-1], iter(images * 2 - 1)
    pixels = np.zeros((len(rows), max(rows), 3, size, size), np.float32)
    mask = np.zeros((len(rows), max(rows), size, size), bool)
    for row, n in enumerate(rows):
        for i in range(n):
            pixels[row, i], mask[row, i] = next(taken), True
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


class OnnxModel:
    """The three graphs as one model of numpy arrays; dtype is that of the cache."""

    def __init__(self, graphs: dict[str, Graph], cfg, image_token_id: int, dtype=np.float32):
        self.graphs, self.cfg, self.image_token_id, self.dtype = graphs, cfg, image_token_id, dtype

    def embed(self, ids: np.ndarray, images: dict[str, np.ndarray] | None = None) -> np.ndarray:
        embeds = np.array(self.graphs[EMBED_TOKENS]({"input_ids": ids})[0])
        if images is not None:
            features = self.graphs[VISION_ENCODER](images)[0]
            embeds[ids == self.image_token_id] = features.reshape(-1, features.shape[-1])
        return embeds

    def empty_cache(self, batch_size: int) -> dict[str, np.ndarray]:
        shape = (batch_size, self.cfg.lm_n_kv_heads, 0, self.cfg.lm_head_dim)
        parts = [f"{i}.{part}" for i in range(self.cfg.lm_n_blocks) for part in ("key", "value")]
        return {f"past_key_values.{part}": np.zeros(shape, self.dtype) for part in parts}

    def forward(self, embeds, mask, positions, cache) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        inputs = {"inputs_embeds": embeds, "attention_mask": mask, "position_ids": positions}
        logits, *present = self.graphs[DECODER](inputs | cache)
        return logits, dict(zip(cache, present))

    def generate(self, ids, mask, images, n_tokens: int, short_mask: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Greedy ids (B, n_tokens) and the logits they were taken from; short_mask passes the new one's mask alone."""
        cache, embeds = self.empty_cache(len(ids)), self.embed(ids, images)
        positions, all_ids, all_logits = np.maximum(mask.cumsum(1) - 1, 0), [], []
        for _ in range(n_tokens):
            logits, cache = self.forward(embeds, mask, positions, cache)
            all_logits.append(logits[:, -1])
            all_ids.append(logits[:, -1].argmax(-1))
            ids, positions = all_ids[-1][:, None], positions[:, -1:] + 1
            mask = np.ones_like(ids) if short_mask else np.concatenate([mask, np.ones_like(ids)], axis=1)
            embeds = self.embed(ids)
        return np.stack(all_ids, 1), np.stack(all_logits, 1)
