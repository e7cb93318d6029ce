"""A model's ONNX graphs in OpenVINO on the CPU: float32, bfloat16, or int8 weights and activations by NNCF."""

import hashlib
import sys
from contextlib import redirect_stdout
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from eval.peers import Engine, import_peer
from models.checkpoint import format_of
from models.common import files
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm.captioner import Captioner
from nanovlm.export.onnx import DECODER, VISION_ENCODER, check_onnx_extra, write_onnx
from nanovlm.synthetic import draw, random_scene

Feeds = dict[str, np.ndarray]

PRECISION_HINTS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
CALIBRATION_INPUTS = 8
CALIBRATION_TOKENS = 80


class OpenVINOEngine(Engine):
    """A model's exported graphs; in int8, dtype is that of everything but the matrix products.

    The decoder is made stateful, as OpenVINO's own export of language models is: it keeps keys and values itself.
    """

    def __init__(self, captioner: Captioner, dtype: torch.dtype, folder: Path, int8: bool = False):
        openvino = import_peer("openvino", "OpenVINO")
        from openvino._offline_transformations import apply_make_stateful_transformation

        self.dtype = torch.int8 if int8 else dtype
        self.name = f"openvino {str(self.dtype).removeprefix('torch.')}"
        self.weight_bytes = self.dtype.itemsize
        self.cfg = captioner.model.cfg
        self.length = 0
        self.embedding = captioner.model.decoder.token_embedding
        graphs = export_graphs(captioner.model, folder)
        with redirect_stdout(sys.stderr):  # NNCF prints its progress
            graphs = quantize_graphs(captioner, graphs) if int8 else graphs
        core = openvino.Core()
        self.tensor = openvino.Tensor
        settings = {
            "INFERENCE_PRECISION_HINT": PRECISION_HINTS[dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,  # it would leave the cores that taskset allows
        }
        suffix = "xml" if int8 else "onnx"
        vision, decoder = (core.read_model(graphs / f"{name}.{suffix}") for name in (VISION_ENCODER, DECODER))
        names = {name: name.replace("past_key_values", "present") for name in empty_past(self.cfg, 1)}
        apply_make_stateful_transformation(decoder, names)
        self.vision = core.compile_model(vision, "CPU", settings)
        self.decoder = core.compile_model(decoder, "CPU", settings).create_infer_request()

    def encode_image(self, image: Tensor) -> Tensor:
        return torch.from_numpy(self.vision(image_feeds(self.cfg, image), share_inputs=True)["image_features"])

    def clear(self) -> None:
        self.length = 0

    @torch.inference_mode()
    def append(self, ids: list[list[int]]) -> Tensor:
        if not self.length:
            empty, *_ = empty_past(self.cfg, len(ids)).values()
            for state in self.decoder.query_state():
                state.state = self.tensor(empty)
        feeds = text_feeds(self.embedding(torch.tensor(ids)).numpy(), self.length)
        self.length += len(ids[0])
        return torch.from_numpy(self.decoder.infer(feeds, share_inputs=True)["logits"]).squeeze(1)


def image_feeds(cfg: VLMConfig, image: Tensor) -> Feeds:
    """The vision encoder's inputs for one preprocessed image, scaled as the graph expects."""
    pixels = image * 2 - 1 if format_of(cfg).unit_pixels else image
    return {"pixel_values": pixels[None].numpy(), "pixel_attention_mask": np.ones((1, 1, *image.shape[2:]), bool)}


def text_feeds(embeds: np.ndarray, past: int) -> Feeds:
    """The decoder's inputs for embeddings (B, T, C) behind `past` cached tokens."""
    B, T, _ = embeds.shape
    positions = np.tile(np.arange(past, past + T, dtype=np.int64), (B, 1))
    return {"inputs_embeds": embeds, "attention_mask": np.ones((B, past + T), np.int64), "position_ids": positions}


def empty_past(cfg: VLMConfig, batch_size: int) -> Feeds:
    """The decoder's inputs that hold keys and values, before the first token."""
    empty = np.zeros((batch_size, cfg.lm_n_kv_heads, 0, cfg.lm_head_dim), np.float32)
    parts = [f"{i}.{part}" for i in range(cfg.lm_n_blocks) for part in ("key", "value")]
    return {f"past_key_values.{part}": empty for part in parts}


def export_graphs(model: VisionLanguageModel, folder: Path) -> Path:
    """The model's graphs in float32, in a folder inside `folder` named by the weights; written if missing.

    The decoder's head reads the last token alone, as every engine for language models does in a prefill; the exported
    files compute logits of all tokens. Raises MissingExtraError without the extra onnx.
    """
    check_onnx_extra()
    digest = hashlib.sha256(repr(model.cfg).encode())
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    graphs = folder / f"onnx-{digest.hexdigest()[:12]}"
    if not graphs.exists():
        hook = model.decoder.norm.register_forward_pre_hook(lambda norm, inputs: (inputs[0][:, -1:],))
        with hook, files.filling(graphs) as new:
            write_onnx(model, new, ("float32",))
    return graphs


@torch.inference_mode()
def quantize_graphs(captioner: Captioner, graphs: Path) -> Path:
    """The graphs with int8 weights and activations, in a folder beside them; written if missing.

    NNCF's post-training quantization for transformers, calibrated on drawn images and on random text, as eval.latency
    measures.
    """
    nncf, openvino = (import_peer(module, "int8 in OpenVINO") for module in ("nncf", "openvino"))
    folder = graphs.with_name(f"{graphs.name}-nncf")
    cfg = captioner.model.cfg
    if folder.exists():
        return folder
    feeds: dict[str, list[Feeds]] = {VISION_ENCODER: [], DECODER: []}
    generator = torch.Generator().manual_seed(2)
    embedding = captioner.model.decoder.token_embedding
    for i in range(CALIBRATION_INPUTS):
        drawn = draw(random_scene(Random(f"calibration {i}")), cfg.vit_img_size, cfg.vit_img_size)
        feeds[VISION_ENCODER].append(image_feeds(cfg, captioner.prepare(drawn)[1][0][:1]))
        ids = torch.randint(min(1000, cfg.lm_vocab_size), (1, CALIBRATION_TOKENS), generator=generator)
        feeds[DECODER].append(text_feeds(embedding(ids).numpy(), 0) | empty_past(cfg, 1))
    with files.filling(folder) as new:
        for name, inputs in feeds.items():
            model = openvino.Core().read_model(graphs / f"{name}.onnx")
            settings = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(inputs)}
            openvino.save_model(nncf.quantize(model, nncf.Dataset(inputs), **settings), new / f"{name}.xml", False)
    return folder
