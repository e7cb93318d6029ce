"""Write LoRA adapters for the export of their base model: PEFT's files under SmolVLM's names."""

from pathlib import Path

from models.errors import InputError
from models.lora import fully_trained, smolvlm_adapters, write_adapter_files
from models.vision_language_model import VisionLanguageModel


def write_smolvlm_adapters(folder: Path, model: VisionLanguageModel, base: str) -> None:
    """Write the model's adapters as two files that PEFT loads onto base, the exported base model.

    Raises InputError if weights of a nanoVLM model's patch embedding, which the export rescales, were trained in full.
    """
    rescaled = sorted(name for name in fully_trained(model) if name.startswith("vision_encoder.patch_embedding."))
    if rescaled and model.cfg.smolvlm is None:
        raise InputError(f"{rescaled[0]} was trained in full, but the export rescales it; export the merged model")
    settings = {"base_model_name_or_path": base, "task_type": "CAUSAL_LM"}
    write_adapter_files(folder, model, smolvlm_adapters(model), settings)
