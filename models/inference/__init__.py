"""The fast inference path: CPU kernels, quantization, the decode step and continuous batching."""

from typing import TYPE_CHECKING

from models import imported_on_use

if TYPE_CHECKING:
    from models.inference.continuous_batching import ContinuousBatch
    from models.inference.inference_model import InferenceModel

__all__ = ["ContinuousBatch", "InferenceModel"]

__getattr__ = imported_on_use(
    __name__,
    {
        "ContinuousBatch": "models.inference.continuous_batching",
        "InferenceModel": "models.inference.inference_model",
    },
)
