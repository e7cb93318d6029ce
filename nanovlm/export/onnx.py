"""Write a model as ONNX graphs, in the files and under the names of the published SmolVLM repositories.

    file                   inputs                                            outputs
    vision_encoder         pixel_values, pixel_attention_mask                image_features
    embed_tokens           input_ids                                         inputs_embeds
    decoder_model_merged   inputs_embeds, attention_mask, position_ids,      logits,
                           past_key_values.N.key, past_key_values.N.value    present.N.key, present.N.value

One decoder graph does prefill, with past keys and values of length 0, and decoding. The graphs are made of standard
operators of opset 18 alone, by `torch.onnx.export`. transformers.js reads these files. Writing needs the extra onnx.
"""

import copy
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import grouped_attention
from models.cache import KVCache
from models.checkpoint import CONFIG, TOKENIZER_CONFIG, format_of, read_model_text, read_object
from models.common import files
from models.common.errors import InputError
from models.formats.smolvlm import PREPROCESSOR, PROCESSOR, TEMPLATE
from models.language_model import build_attention_mask, inverse_frequencies, rope_cos_sin
from models.vision_language_model import VisionLanguageModel
from nanovlm.captioner import Captioner
from nanovlm.errors import MissingExtraError
from nanovlm.export import ONNX_TYPES

VISION_ENCODER = "vision_encoder"  # names of files
EMBED_TOKENS = "embed_tokens"
DECODER = "decoder_model_merged"
OPSET = 18
ONNX_FOLDER = "onnx"
MAX_FILE_BYTES = 2**31 - 2**24  # a protobuf file holds less than 2 GiB; larger weights go to NAME.onnx_data

# Input or output -> the names of its dimensions of variable length; of the past, without the layer.
DIMENSIONS: dict[str, dict[int, str]] = {
    "pixel_values": {0: "batch_size", 1: "num_images"},
    "pixel_attention_mask": {0: "batch_size", 1: "num_images"},
    "image_features": {0: "num_real_images"},
    "input_ids": {0: "batch_size", 1: "sequence_length"},
    "inputs_embeds": {0: "batch_size", 1: "sequence_length"},
    "attention_mask": {0: "batch_size", 1: "total_sequence_length"},
    "position_ids": {0: "batch_size", 1: "sequence_length"},
    "past_key_values": {0: "batch_size", 2: "past_sequence_length"},
    "logits": {0: "batch_size", 1: "sequence_length"},
    "present": {0: "batch_size", 2: "past_sequence_length + sequence_length"},
}

logger = logging.getLogger(__name__)


def check_onnx_extra() -> None:
    """Raise MissingExtraError unless the packages that `export_onnx` uses are installed."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(f"ONNX files need {name}: pip install 'nanovlm[onnx]'")


def export_onnx(captioner: Captioner, folder: str | Path, dtypes: Sequence[str] = ("float32",)) -> None:
    """Add the folder onnx to what `export_smolvlm` wrote; MissingExtraError without onnx."""
    check_onnx_extra()
    folder = Path(folder)
    model = captioner.model
    with files.filling(folder / ONNX_FOLDER) as new:
        write_onnx(model, new, dtypes)
    _add_transformers_js_settings(folder)


def _add_transformers_js_settings(folder: Path) -> None:
    """Write settings to the places where transformers.js looks, and transformers does not."""
    second_files = {path.name.removesuffix("_data"): 1 for path in sorted((folder / ONNX_FOLDER).glob("*.onnx_data"))}
    settings = {"kv_cache_dtype": {"fp16": "float16"}, "use_external_data_format": second_files}
    added: dict[str, dict] = {CONFIG: {"transformers.js_config": settings}}
    if (folder / TEMPLATE).exists():
        added[TOKENIZER_CONFIG] = {"chat_template": read_model_text(folder / TEMPLATE)}
    processor = read_object(folder / PROCESSOR) if (folder / PROCESSOR).exists() else {}
    if "image_processor" in processor and not (folder / PREPROCESSOR).exists():
        added[PREPROCESSOR] = {**processor["image_processor"], "processor_class": processor.get("processor_class")}
    for name, new in added.items():
        old = read_object(folder / name) if (folder / name).exists() else {}
        files.replace(folder / name, json.dumps(old | new, indent=2) + "\n")


class VisionEncoderGraph(nn.Module):
    """Vision encoder and projector, for pixels as SmolVLM's processor normalizes them; nanoVLM's are in [0, 1]."""

    def __init__(self, model: VisionLanguageModel):
        super().__init__()
        self.unit_pixels = format_of(model.cfg).unit_pixels
        self.vision_encoder = model.vision_encoder
        self.MP = model.MP
        self.outputs = ["image_features"]
        B, n, S = 2, 3, model.cfg.vit_img_size
        mask = torch.ones(B, n, S, S, dtype=torch.bool)
        self.examples = {"pixel_values": torch.zeros(B, n, 3, S, S), "pixel_attention_mask": mask}

    def forward(self, pixel_values: Tensor, pixel_attention_mask: Tensor) -> Tensor:
        """Pixels (B, n, 3, S, S) float32 and mask (B, n, S, S) bool to features (N, mp_image_token_length, C) float32.

        N counts the images with any pixel in the mask, in reading order: the processor fills rows of fewer images.
        """
        images = pixel_values.flatten(0, 1)
        if self.unit_pixels:
            images = (images + 1) / 2  # the files of `models.formats.to_smolvlm` rescale the patch convolution instead
        features = self.MP(self.vision_encoder(images.to(self.MP.proj.weight.dtype))).float()
        return features[pixel_attention_mask.flatten(0, 1).flatten(1).any(1)]


class EmbedTokensGraph(nn.Module):
    def __init__(self, model: VisionLanguageModel):
        super().__init__()
        self.token_embedding = model.decoder.token_embedding
        self.outputs = ["inputs_embeds"]
        self.examples = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}

    def forward(self, input_ids: Tensor) -> Tensor:
        """Ids (B, T) to embeddings (B, T, C) float32."""
        return self.token_embedding(input_ids).float()


class DecoderGraph(nn.Module):
    """The language model from embeddings to logits, with the keys and values of earlier tokens as plain tensors."""

    def __init__(self, model: VisionLanguageModel):
        super().__init__()
        cfg = model.cfg
        self.cfg = cfg
        self.dtype = model.dtype
        self.decoder = copy.deepcopy(model.decoder, {id(p): p for p in model.parameters()})  # shares the weights
        for block in self.decoder.blocks:
            block.attn.attend = grouped_attention  # SDPA's graph would repeat the keys
        self.frequencies = inverse_frequencies(cfg.lm_head_dim, cfg.lm_re_base)  # a constant of the graph, in float32
        parts = [f"{i}.{part}" for i in range(cfg.lm_n_blocks) for part in ("key", "value")]
        self.outputs = ["logits", *(f"present.{part}" for part in parts)]
        B, T, n_past = 2, 5, 7
        self.examples = {
            "inputs_embeds": torch.zeros(B, T, cfg.lm_hidden_dim),
            "attention_mask": torch.ones(B, n_past + T - 3, dtype=torch.long),
            "position_ids": torch.arange(n_past, n_past + T).repeat(B, 1),
        }
        for part in parts:
            past = torch.zeros(B, cfg.lm_n_kv_heads, n_past, cfg.lm_head_dim, dtype=self.dtype)
            self.examples[f"past_key_values.{part}"] = past

    def forward(
        self, inputs_embeds: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits (B, T, vocabulary) float32, and keys and values of past and new tokens, in the order of past.

        inputs_embeds (B, T, C) float32, position_ids (B, T); past alternates keys and values (B, n_kv_heads, T_past,
        head_dim). attention_mask (B, T_past + T) is 0 at padding. A shorter one is that of the last tokens, and all
        before them are visible: SmolVLM's model card passes one of the new token alone.
        """
        B, T, _ = inputs_embeds.shape
        missing = past[0].size(2) + T - attention_mask.size(1)
        attention_mask = torch.cat([attention_mask.new_ones(B, missing), attention_mask], dim=1)
        mask = build_attention_mask(attention_mask, T)
        cos, sin = rope_cos_sin(position_ids[:, None], self.cfg, self.frequencies)
        x = inputs_embeds.to(self.dtype)
        present = []
        for block, key, value in zip(self.decoder.blocks, past[::2], past[1::2]):
            x, kv = block(x, cos, sin, mask, KVCache(key, value))
            present += [kv.key, kv.value]
        return self.decoder.head(self.decoder.norm(x)).float(), *present


GRAPHS = {VISION_ENCODER: VisionEncoderGraph, EMBED_TOKENS: EmbedTokensGraph, DECODER: DecoderGraph}


def write_onnx(model: VisionLanguageModel, folder: Path, dtypes: Sequence[str] = ("float32",)) -> None:
    """Write the three graphs into a folder, in each of some ONNX_TYPES.

    Pixels, embeddings and logits are float32 in every type; past keys and values are float16 in the type float16. In
    int8, onnxruntime's dynamic quantization stores the matrices of the float32 graphs in 8 bits, and their inputs are
    rounded when they run. Weights that a protobuf file cannot hold go to a file beside it, NAME.onnx_data. Raises
    InputError for other types.
    """
    if unknown := [dtype for dtype in dtypes if dtype not in ONNX_TYPES]:
        raise InputError(f"no ONNX graphs in {', '.join(unknown)}; use {', '.join(ONNX_TYPES)}")
    if "float16" in dtypes:
        half = _in_dtype(model, torch.float16)
        for name, graph in GRAPHS.items():
            _write_graph(graph(half), folder / f"{name}{ONNX_TYPES['float16']}.onnx")
    if "float32" in dtypes or "int8" in dtypes:
        exact = _in_dtype(model, torch.float32)
        for name, graph in GRAPHS.items():
            with files.scratch_folder(folder) as scratch:
                path = (folder if "float32" in dtypes else scratch) / f"{name}.onnx"
                _write_graph(graph(exact), path)
                if "int8" in dtypes:
                    _quantize(path, folder / f"{name}{ONNX_TYPES['int8']}.onnx")


@torch.enable_grad()  # KVCache.append then concatenates, as a graph must
def _write_graph(module: Any, path: Path) -> None:
    """Trace a graph for its examples, and write it.

    Their variable lengths are all different, and none is 0 or 1, which torch.export would take for constants.
    """
    from onnxscript import ir

    logger.info("writing %s", path.name)
    names = [*module.examples]
    shapes: list[Any] = [dict.fromkeys(_dimensions(name), torch.export.Dim.DYNAMIC) for name in names]
    if "attention_mask" in names:  # the past is one argument of forward
        shapes[3:] = [tuple(shapes[3:])]
    with _quiet():
        args = tuple(module.examples.values())
        program = torch.export.export(module.eval(), args, dynamic_shapes=tuple(shapes), strict=False)
        onnx_program: Any = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, input_names=names, output_names=module.outputs, verbose=False,
            optimize=True,
        )  # fmt: skip
    graph_model = onnx_program.model
    for value in (*graph_model.graph.inputs, *graph_model.graph.outputs):
        dimensions = _dimensions(value.name)
        value.shape = ir.Shape([dimensions.get(i, size) for i, size in enumerate(value.shape)])
    _save(graph_model, path)


def _save(graph_model: Any, path: Path) -> None:
    from onnxscript import ir

    n_bytes = sum(initializer.const_value.nbytes for initializer in graph_model.graph.initializers.values())
    ir.save(graph_model, path, external_data=path.with_suffix(".onnx_data").name if n_bytes > MAX_FILE_BYTES else None)


def _dimensions(name: str) -> dict[int, str]:
    return DIMENSIONS[name.partition(".")[0]]


def _in_dtype(model: VisionLanguageModel, dtype: torch.dtype) -> VisionLanguageModel:
    """The model in eval mode, in that dtype and on the CPU: itself if it is so, else a copy."""
    if (model.dtype, model.device.type, model.training) == (dtype, "cpu", False):
        return model
    return copy.deepcopy(model).to("cpu", dtype).eval()


def _quantize(path: Path, quantized: Path) -> None:
    """Store the matrices and embeddings of a graph in 8 bits, with the settings of transformers.js."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxscript import ir

    logger.info("writing %s", quantized.name)
    with files.scratch_folder(quantized.parent) as folder, _quiet():
        new = folder / path.name  # for large models with a second file, under a name of onnxruntime's own
        quantize_dynamic(
            path,
            new,
            op_types_to_quantize=["MatMul", "Gather"],  # onnxruntime has no signed 8-bit convolution on CPUs
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,  # to 7 bits: 8 overflow on CPUs with AVX2 but without VNNI
            use_external_data_format=path.with_suffix(".onnx_data").exists(),
        )
        _save(ir.load(new), quantized)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter and onnxruntime's quantization, which would give a bare root logger a handler."""
    handler = logging.NullHandler()
    disabled = logging.root.manager.disable
    logging.getLogger().addHandler(handler)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)
        logging.getLogger().removeHandler(handler)
