"""Tensors: the vision-language model, its caches, its generation loop and its checkpoints.

The files of this folder are the core, to be read in an afternoon: config, cache, attention, vision_transformer,
modality_projector, language_model, vision_language_model, sampling, decoding, checkpoint, files and errors. The
subfolders are add-ons, which the core does not import. It reads nanoVLM's own files; `import models.formats` lets it
read SmolVLM's and others.

>>> from models import VisionLanguageModel
>>> model = VisionLanguageModel.from_pretrained("lusxvr/nanoVLM-230M-8k")
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.cache import KVCache
    from models.config import VLMConfig
    from models.sampling import SamplingParams
    from models.vision_language_model import VisionLanguageModel

__all__ = ["KVCache", "SamplingParams", "VLMConfig", "VisionLanguageModel"]

_LAZY = {  # imported on first use: importing torch takes seconds
    "KVCache": "models.cache",
    "SamplingParams": "models.sampling",
    "VLMConfig": "models.config",
    "VisionLanguageModel": "models.vision_language_model",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
