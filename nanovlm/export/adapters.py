"""Export a LoRA run in two parts: its base model in SmolVLM's layout, and its adapters as PEFT loads them onto it."""

from pathlib import Path

import torch

from models.checkpoint import checkpoint_dtype, format_of, snapshot_path
from models.common import files
from models.formats.smolvlm import SmolVLM
from models.lora import fully_trained, merged_state
from models.lora.files import ADAPTER, ADAPTER_CONFIG, read_adapters, recorded_base, write_adapter_files
from models.vision_language_model import VisionLanguageModel, load_model
from nanovlm.captioner import Captioner
from nanovlm.device import choose_dtype
from nanovlm.errors import CheckpointError, InputError, UsageError
from nanovlm.export.transformers import export_smolvlm


def export_with_adapters(
    trained: str | Path, folder: str | Path, base: str | None = None, dtype: str = "float32"
) -> Captioner:
    """Export a LoRA run: its base model in folder, and its adapters in folder/adapter, as PEFT loads them onto it.

    trained is the run's folder, which also holds the merged model. base is the folder or Hub id of the base model, by
    default the one that adapter_config.json names. Returns the base model. Raises UsageError if none is named, and
    CheckpointError if base is not the model that the adapters were trained on.
    """
    trained = Path(trained)
    folder = Path(folder)
    base, revision = (base, None) if base else recorded_base(trained)
    if not base:
        raise UsageError(f"{trained}: {ADAPTER_CONFIG} names no base model; pass --base with the one that was trained")
    captioner = Captioner.from_pretrained(base, "cpu", "float32", revision=revision)
    adapted = load_model(snapshot_path(base, revision), captioner.model.cfg, captioner.tokenizer.image_token_id)
    read_adapters(trained, adapted)
    _check_base(base, trained, adapted)
    exported = Captioner(captioner.model.to(choose_dtype(dtype, torch.device("cpu"))), captioner.processor)
    export_smolvlm(exported, folder)
    with files.filling(folder / ADAPTER) as new:
        write_smolvlm_adapters(new, adapted, base=str(folder.resolve()))
    return exported


def _check_base(base: str, trained: Path, adapted: VisionLanguageModel) -> None:
    """Raise CheckpointError unless base and adapters merge to the model in trained, up to its dtype's rounding."""
    stored = load_model(trained, adapted.cfg, adapted.image_token_id).state_dict()
    tolerance = max(torch.finfo(checkpoint_dtype(trained)).eps, 1e-3)
    for name, tensor in merged_state(adapted):
        if not torch.allclose(tensor, stored[name], rtol=tolerance, atol=1e-5):
            raise CheckpointError(
                f"the adapters in {trained} were not trained on {base}, whose {name} differs; "
                "pass --base with the model that was trained"
            )


def write_smolvlm_adapters(folder: Path, model: VisionLanguageModel, base: str) -> None:
    """Write the model's adapters as two files that PEFT loads onto base, the exported base model.

    Raises InputError if weights of a nanoVLM model's patch embedding, which the export rescales, were trained in full.
    """
    rescaled = sorted(name for name in fully_trained(model) if name.startswith("vision_encoder.patch_embedding."))
    if rescaled and format_of(model.cfg).unit_pixels:
        raise InputError(f"{rescaled[0]} was trained in full, but the export rescales it; export the merged model")
    settings = {"base_model_name_or_path": base, "task_type": "CAUSAL_LM"}
    write_adapter_files(folder, model, SmolVLM.to_stored, settings)
