"""Tensors: the vision-language model, its caches, its generation loop and its checkpoints.

The files of this folder are the core, to be read in an afternoon: config, cache, attention, vision_transformer,
modality_projector, language_model, vision_language_model and decoding. It stands on `models.common` (errors, the gate
for files, records of options) and `models.checkpoint` (weights in files); the other subfolders are add-ons, which the
core does not import. It reads nanoVLM's own files; `import models.formats` lets it read SmolVLM's and others.

>>> from models import VisionLanguageModel
>>> model = VisionLanguageModel.from_pretrained("lusxvr/nanoVLM-230M-8k")
"""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.cache import KVCache
    from models.common.options import SamplingParams
    from models.config import VLMConfig
    from models.vision_language_model import VisionLanguageModel

__all__ = ["KVCache", "SamplingParams", "VLMConfig", "VisionLanguageModel"]


def imported(place: str) -> Any:
    """Import the object at module:name."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def imported_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports its names from modules on first use: torch alone takes seconds."""

    def get(name: str) -> Any:
        if name in modules:
            return imported(f"{modules[name]}:{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


__getattr__ = imported_on_use(
    __name__,
    {
        "KVCache": "models.cache",
        "SamplingParams": "models.common.options",
        "VLMConfig": "models.config",
        "VisionLanguageModel": "models.vision_language_model",
    },
)
