"""The ONNX graphs of `nanovlm export --onnx`, and what they read."""

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
from torch import Tensor

from models.checkpoint import atomic_dir
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm.export.onnx import DECODER, check_onnx_extra, write_onnx

Feeds = dict[str, np.ndarray]


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


def past_names(cfg: VLMConfig) -> list[str]:
    """The decoder's inputs that hold keys and values."""
    return [f"past_key_values.{i}.{part}" for i in range(cfg.lm_n_blocks) for part in ("key", "value")]


def empty_past(cfg: VLMConfig, batch_size: int) -> np.ndarray:
    """Keys or values of a layer before the first token."""
    return np.zeros((batch_size, cfg.lm_n_kv_heads, 0, cfg.lm_head_dim), np.float32)


def export_graphs(model: VisionLanguageModel, folder: Path) -> Path:
    """The model's graphs in float32, in a folder inside `folder` named by the weights; written if missing.

    The decoder's head reads the last token alone, as every engine for language models does in a prefill; the exported
    files compute logits of all tokens. Raises MissingExtraError without the extra onnx.
    """
    check_onnx_extra()
    graphs = folder / f"onnx-{weights_digest(model)}"
    if not graphs.exists():
        with atomic_dir(graphs) as new:
            write_onnx(model, new, ("float32",))
            keep_last_logits(new / f"{DECODER}.onnx")
    return graphs


@lru_cache(maxsize=1)
def weights_digest(model: VisionLanguageModel) -> str:
    """A name for the model's config and weights, which must not change between calls for the same object."""
    digest = hashlib.blake2b(repr(model.cfg).encode(), digest_size=6)
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()


def keep_last_logits(path: Path) -> None:
    """Slice, in a decoder's file, the last token out of what the head reads."""
    import onnx

    model = onnx.load(path)
    graph = model.graph
    producers = {output: node for node in graph.node for output in node.output}
    node = producers["logits"]
    while node.op_type != "MatMul":
        node = next(producers[name] for name in node.input if name in producers)
    for name, value in (("last_start", -1), ("last_end", 2**31 - 1), ("last_axis", 1)):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([value], np.int64), name))
    inputs = [node.input[0], "last_start", "last_end", "last_axis"]
    graph.node.insert(list(graph.node).index(node), onnx.helper.make_node("Slice", inputs, ["last_hidden"]))
    node.input[0] = "last_hidden"
    graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    onnx.save(model, path, save_as_external_data=path.with_suffix(".onnx_data").exists())
