"""The fast inference path: CPU kernels, quantization, the decode step and continuous batching."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.inference.continuous_batching import ContinuousBatch
    from models.inference.inference_model import InferenceModel

__all__ = ["ContinuousBatch", "InferenceModel"]

_LAZY = {  # imported on first use: nanovlm.device needs one module of the package only
    "ContinuousBatch": "models.inference.continuous_batching",
    "InferenceModel": "models.inference.inference_model",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
