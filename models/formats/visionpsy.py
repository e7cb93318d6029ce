"""VisionPsy-Nano-460M and -Flash (Tether, 2026): nanoVLM's fifth version with gate and up in one tensor.

Flash has another resize rule, see `nanovlm.processing.layouts.visionpsy`. Files are written as nanoVLM's, with the
keys of VisionPsy only where nanoVLM's own format has none for the rule.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint import NANOVLM, TOKENIZER, Format
from models.common.errors import CheckpointError
from models.config import VLMConfig

FLASH_MIN_SIDE = 512  # pixels
VARIANTS = {  # of older configs: True for Flash
    "flash": True, "nano-flash": True, "visionpsy-nano-flash": True,
    "nano": False, "plain": False, "nano-plain": False, "visionpsy-nano": False,
}  # fmt: skip
OWN_KEYS = {  # of VisionPsy and transformers; the last four change only its speed
    "model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "is_flash", "variant",
    "resize_min_side_len", "inference_max_img_size", "compile_inference", "compile_inference_mode",
    "cuda_graphs_cache_quantum", "eos_check_interval",
}  # fmt: skip


@dataclass(frozen=True)
class VisionPsy(Format):
    name = "visionpsy"

    min_side: int | None = None  # pixels, to which a smaller short side is enlarged

    @classmethod
    def read_config(cls, raw: dict, files: Mapping[str, str]) -> VLMConfig:
        if "lm_hidden_dim" not in raw and {"text_config", "vision_config"} & raw.keys():
            raise CheckpointError("an MLX repack of VisionPsy is not supported; use qvac/VisionPsy-Nano-460M")
        flash = is_flash(raw)
        to_max = raw.get("resize_to_max_side_len")
        to_max = not flash if to_max is None else to_max
        key = raw.get("resize_min_side_len")
        if key is not None and (type(key) is not int or key < 1):
            raise CheckpointError(f"resize_min_side_len={key!r} is no number of pixels")
        min_side = None if to_max else max(key or 0, FLASH_MIN_SIDE) if flash else key
        largest = raw.get("inference_max_img_size") or raw.get("max_img_size")
        if key and type(largest) is int and key > largest:
            raise CheckpointError(f"resize_min_side_len={key} is more than the longest side of {largest} pixels")
        own = {name: value for name, value in raw.items() if name not in OWN_KEYS} | {"resize_to_max_side_len": to_max}
        if largest is not None:
            own["max_img_size"] = largest
        if own.get("vlm_checkpoint_path") is None:
            own["vlm_checkpoint_path"] = "checkpoints"
        return replace(super().read_config(own, files), format=cls(min_side))

    def config_dict(self, cfg: VLMConfig) -> dict:
        """nanoVLM's config; its keys can express the resize rule of a model without min_side."""
        config = super().config_dict(cfg)
        if self.min_side is None:
            return config
        flash = {"is_flash": self.min_side >= FLASH_MIN_SIDE, "resize_min_side_len": self.min_side}
        return {"model_type": "visionpsynano", **config, **flash}

    @staticmethod
    def to_stored(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stored = dict(state)
        for name in state:
            up = name.replace("gate_proj", "up_proj")
            if "mlp.gate_proj" in name and up in state:
                joined = torch.cat([stored.pop(name), stored.pop(up)])
                stored[name.replace("gate_proj", "gate_up_proj")] = joined
        return stored

    @staticmethod
    def from_stored(stored: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        for name in [name for name in stored if "gate_up_proj" in name]:
            gate, up = stored.pop(name).chunk(2)
            stored[name.replace("gate_up_proj", "gate_proj")] = gate
            stored[name.replace("gate_up_proj", "up_proj")] = up
        return stored

    def for_names(self, names: Iterable[str]) -> Format:
        """Tensors may be joined or, as nanoVLM's, not."""
        return self if any("gate_up_proj" in name for name in names) else NANOVLM

    def find_image_token_id(self, folder: Path, cfg: VLMConfig) -> int:
        """Find the id by the token's text alone: the order of vlm_extra_tokens is not that of the ids."""
        if not (folder / TOKENIZER).exists():
            raise CheckpointError(f"{folder} has no {TOKENIZER}, which this format needs")
        return super().find_image_token_id(folder, replace(cfg, lm_base_vocab_size=None))


def is_flash(raw: Mapping) -> bool:
    """True for a config.json of Flash's resize rule. CheckpointError for an unknown value."""
    if (flash := raw.get("is_flash")) is not None:
        if type(flash) is not bool:
            raise CheckpointError(f"is_flash={flash!r} is neither true nor false")
        return flash
    if (variant := raw.get("variant")) is not None:
        if variant not in VARIANTS:
            raise CheckpointError(f"variant={variant!r} is none of {', '.join(VARIANTS)}")
        return VARIANTS[variant]
    return raw.get("resize_to_max_side_len") is False
