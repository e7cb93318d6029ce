"""Write LoRA adapters for the export of their base model: PEFT's files under SmolVLM's names."""

from pathlib import Path

from torch import Tensor

from models.errors import InputError
from models.lora import adapters, fully_trained, write_adapter_files
from models.smolvlm import to_smolvlm
from models.vision_language_model import VisionLanguageModel


def smolvlm_adapters(model: VisionLanguageModel) -> dict[str, Tensor]:
    """The adapters, and what was trained in full, under SmolVLM's names.

    An adapter of our qkv_proj becomes one each of q, k and v: they share lora_A and get a third of lora_B's rows.
    Raises InputError if weights of a nanoVLM model's patch embedding, which the export rescales, were trained in full.
    """
    tensors = {}
    for name, module in adapters(model).items():
        for weight, lora_b in to_smolvlm({f"{name}.weight": module.lora_B.weight}).items():
            target = weight.removesuffix(".weight")
            tensors[f"{target}.lora_A.weight"] = module.lora_A.weight
            tensors[f"{target}.lora_B.weight"] = lora_b
    trained = fully_trained(model)
    rescaled = sorted(name for name in trained if name.startswith("vision_encoder.patch_embedding."))
    if rescaled and model.cfg.smolvlm is None:
        raise InputError(
            f"{rescaled[0]} was trained in full, but SmolVLM's export rescales it; export the merged model"
        )
    return tensors | to_smolvlm(trained)


def write_smolvlm_adapters(folder: Path, model: VisionLanguageModel, base: str) -> None:
    """Write the model's adapters as two files that PEFT loads onto base, the exported base model."""
    settings = {"base_model_name_or_path": base, "task_type": "CAUSAL_LM"}
    write_adapter_files(folder, model, smolvlm_adapters(model), settings)
