"""A model's ONNX graphs in ONNX Runtime on the CPU, in float32 or dynamically quantized to int8."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.peers.onnx_engine import Feeds, OnnxEngine, empty_past, export_graphs, graph_path, past_names, present_name
from nanovlm.captioner import Captioner
from nanovlm.errors import MissingExtraError
from nanovlm.export.onnx import DECODER, VISION_ENCODER


class OnnxRuntimeEngine(OnnxEngine):
    """`precision` is float32 or int8: weights of matrix products in 8 bits, their inputs rounded at run time."""

    def __init__(self, captioner: Captioner, precision: str, folder: Path):
        try:
            import onnxruntime
        except ImportError:
            raise MissingExtraError('ONNX Runtime needs the extra peers: pip install "nanovlm[peers]"') from None
        dtype = torch.int8 if precision == "int8" else torch.float32
        super().__init__(f"onnxruntime {precision}", captioner, dtype.itemsize, dtype)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
        options.log_severity_level = 3
        graphs = export_graphs(captioner.model, folder)

        def load(name: str) -> Any:
            path = graph_path(graphs, name, precision)
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        self.vision, self.decoder, self.to_value = load(VISION_ENCODER), load(DECODER), onnxruntime.OrtValue
        self.past: dict[str, Any] = {}

    def run_vision_encoder(self, feeds: Feeds) -> np.ndarray:
        return self.vision.run(["image_features"], feeds)[0]

    def run_decoder(self, feeds: Feeds) -> np.ndarray:
        wrap, names = self.to_value.ortvalue_from_numpy, past_names(self.cfg)
        if feeds["position_ids"][0, 0] == 0:
            self.past = dict.fromkeys(names, wrap(empty_past(self.cfg, len(feeds["position_ids"]))))
        values = {name: wrap(value) for name, value in feeds.items()} | self.past  # the cache is never copied here
        logits, *present = self.decoder.run_with_ort_values(["logits", *map(present_name, names)], values)
        self.past = dict(zip(names, present))
        return logits.numpy()
