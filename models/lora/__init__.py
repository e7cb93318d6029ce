"""LoRA (Hu et al. 2021): trainable low-rank matrices beside frozen weights; adapter files are PEFT's."""

from models.lora.adapter_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_folder,
    adapter_tensors,
    read_adapter_files,
    read_adapters,
    recorded_base,
    write_adapter_files,
    write_adapters,
)
from models.lora.layers import (
    EMBEDDINGS,
    PARTS,
    LoRALinear,
    adapt,
    adapters,
    fully_trained,
    merge,
    merge_on_disk,
    merged_state,
)

__all__ = [
    "ADAPTER",
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "EMBEDDINGS",
    "PARTS",
    "LoRALinear",
    "adapt",
    "adapter_folder",
    "adapter_tensors",
    "adapters",
    "fully_trained",
    "merge",
    "merge_on_disk",
    "merged_state",
    "read_adapter_files",
    "read_adapters",
    "recorded_base",
    "write_adapter_files",
    "write_adapters",
]
