"""A model's ONNX graphs in OpenVINO on the CPU: float32, bfloat16, or int8 weights and activations by NNCF."""

from pathlib import Path
from random import Random

import numpy as np
import torch

from eval.peers import import_peer, onnx_engine
from eval.peers.onnx_engine import Feeds, OnnxEngine, empty_past, export_graphs, past_names
from models.checkpoint import atomic_dir
from nanovlm.captioner import Captioner
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
        openvino = import_peer("openvino", "OpenVINO")
        from openvino._offline_transformations import apply_make_stateful_transformation

        kind = torch.int8 if int8 else dtype
        super().__init__(f"openvino {str(kind).removeprefix('torch.')}", captioner, kind.itemsize, kind)
        graphs = export_graphs(captioner.model, folder)
        if int8:
            graphs = quantize_graphs(captioner, graphs)
        core, self.tensor = openvino.Core(), openvino.Tensor
        settings = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,  # it would leave the cores that taskset allows
        }
        suffix = "xml" if int8 else "onnx"
        vision, decoder = (core.read_model(graphs / f"{name}.{suffix}") for name in (VISION_ENCODER, DECODER))
        apply_make_stateful_transformation(decoder, past_names(self.cfg))
        self.vision = core.compile_model(vision, "CPU", settings)
        self.decoder = core.compile_model(decoder, "CPU", settings).create_infer_request()

    def run_vision_encoder(self, feeds: Feeds) -> np.ndarray:
        return self.vision(feeds, share_inputs=True)["image_features"]

    def run_decoder(self, feeds: Feeds) -> np.ndarray:
        if feeds["position_ids"][0, 0] == 0:
            empty = self.tensor(empty_past(self.cfg, len(feeds["position_ids"])))
            for state in self.decoder.query_state():
                state.state = empty
        return self.decoder.infer(feeds, share_inputs=True)["logits"]


def quantize_graphs(captioner: Captioner, graphs: Path) -> Path:
    """The graphs with int8 weights and activations, in a folder beside them; written if missing.

    NNCF's post-training quantization for transformers, calibrated on drawn images and on random text.
    """
    nncf, openvino = (import_peer(module, "int8 in OpenVINO") for module in ("nncf", "openvino"))
    folder = graphs.with_name(f"{graphs.name}-nncf")
    if folder.exists():
        return folder
    images, prompts = calibration_feeds(captioner)
    with atomic_dir(folder) as new:
        for name, feeds in ((VISION_ENCODER, images), (DECODER, prompts)):
            model = openvino.Core().read_model(onnx_engine.graph_path(graphs, name, "float32"))
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
        images.append(onnx_engine.image_feeds(cfg, image))
        ids = torch.randint(min(1000, cfg.lm_vocab_size), (1, CALIBRATION_TOKENS), generator=generator)
        past = dict.fromkeys(past_names(cfg), empty_past(cfg, 1))
        prompts.append(onnx_engine.text_feeds(captioner.model.decoder.token_embedding(ids).numpy(), 0) | past)
    return images, prompts
