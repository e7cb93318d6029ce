"""A model's ONNX graphs in OpenVINO on the CPU: float32, bfloat16, or int8 weights and activations by NNCF."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from eval.peers.onnx_engine import (
    Feeds,
    OnnxEngine,
    empty_past,
    export_graphs,
    graph_path,
    image_feeds,
    past_names,
    present_name,
    text_feeds,
)
from models.checkpoint import atomic_dir
from nanovlm.captioner import Captioner
from nanovlm.errors import MissingExtraError
from nanovlm.export.onnx import DECODER, VISION_ENCODER
from nanovlm.synthetic import draw, random_scene

PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
CALIBRATION_INPUTS = 8
CALIBRATION_TOKENS = 80


class OpenVINOEngine(OnnxEngine):
    """In int8, dtype is that of everything but the matrix products.

    The decoder is made stateful, as OpenVINO's own export of language models is: it keeps keys and values itself.
    """

    def __init__(self, captioner: Captioner, dtype: torch.dtype, folder: Path, int8: bool = False):
        try:
            import openvino
        except ImportError:
            raise MissingExtraError('OpenVINO needs the extra peers: pip install "nanovlm[peers]"') from None
        kind = torch.int8 if int8 else dtype
        super().__init__(f"openvino {str(kind).removeprefix('torch.')}", captioner, kind.itemsize, kind)
        graphs = export_graphs(captioner.model, folder)
        if int8:
            graphs = quantize_graphs(captioner, graphs)
        self.core, self.tensor = openvino.Core(), openvino.Tensor
        self.settings = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,  # it would leave the cores that taskset allows
        }
        suffix = "xml" if int8 else "onnx"
        vision = self.core.read_model(graphs / f"{VISION_ENCODER}.{suffix}")
        decoder = self.core.read_model(graphs / f"{DECODER}.{suffix}")
        make_stateful(decoder, past_names(self.cfg))
        self.vision, self.decoder = self._compile(vision), self._compile(decoder).create_infer_request()

    def _compile(self, model: Any) -> Any:
        return self.core.compile_model(model, "CPU", self.settings)

    def run_vision_encoder(self, feeds: Feeds) -> np.ndarray:
        return self.vision(feeds, share_inputs=True)["image_features"]

    def run_decoder(self, feeds: Feeds) -> np.ndarray:
        if feeds["position_ids"][0, 0] == 0:
            empty = self.tensor(empty_past(self.cfg, len(feeds["position_ids"])))
            for state in self.decoder.query_state():
                state.state = empty
        return self.decoder.infer(feeds, share_inputs=True)["logits"]


def make_stateful(decoder: Any, names: Sequence[str]) -> None:
    """Turn a decoder's keys and values from inputs and outputs into variables of the model."""
    from openvino._offline_transformations import apply_make_stateful_transformation

    apply_make_stateful_transformation(decoder, {name: present_name(name) for name in names})


def quantize_graphs(captioner: Captioner, graphs: Path) -> Path:
    """The graphs with int8 weights and activations, in a folder beside them; written if missing.

    NNCF's post-training quantization for transformers, calibrated on drawn images and on random text.
    """
    try:
        import nncf
        import openvino
    except ImportError:
        raise MissingExtraError('int8 in OpenVINO needs the extra peers: pip install "nanovlm[peers]"') from None
    folder = graphs.with_name(f"{graphs.name}-nncf")
    if folder.exists():
        return folder
    images, prompts = calibration_feeds(captioner)
    with atomic_dir(folder) as new:
        for name, feeds in ((VISION_ENCODER, images), (DECODER, prompts)):
            model = openvino.Core().read_model(graph_path(graphs, name, "float32"))
            settings = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(feeds)}
            openvino.save_model(nncf.quantize(model, nncf.Dataset(feeds), **settings), new / f"{name}.xml", False)
    return folder


@torch.inference_mode()
def calibration_feeds(captioner: Captioner) -> tuple[list[Feeds], list[Feeds]]:
    """Inputs of the vision encoder and of the decoder: drawn images, and random text, as eval.latency measures."""
    cfg, generator = captioner.model.cfg, torch.Generator().manual_seed(2)
    images, prompts = [], []
    for i in range(CALIBRATION_INPUTS):
        scene = random_scene(Random(f"calibration {i}"))
        image = captioner.processor.preprocess(draw(scene, cfg.vit_img_size, cfg.vit_img_size))[0][:1]
        images.append(image_feeds(cfg, image))
        ids = torch.randint(min(1000, cfg.lm_vocab_size), (1, CALIBRATION_TOKENS), generator=generator)
        past = dict.fromkeys(past_names(cfg), empty_past(cfg, 1))
        prompts.append(text_feeds(captioner.model.decoder.token_embedding(ids).numpy(), 0) | past)
    return images, prompts
